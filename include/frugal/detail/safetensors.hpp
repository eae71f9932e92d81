#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace frugal::inline v0::detail {

// The file is not what was written: truncated, flipped, extended, or never a document of ours. `what()` is one sentence
// that names the file and the place.
struct DamagedFile : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One tensor to be written. `bytes` is memory of the caller: dense, row-major, little-endian.
struct TensorEntry {
  std::string name;
  std::string dtype;  // F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL C64 F8_E4M3 F8_E5M2 F8_E8M0
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

// Metadata keys that start with "frugal.xxh64" are ours.
struct Document {
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> tensors;
};

// One tensor of a file.
struct StoredTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;   // first byte, counted from the start of the data
  std::uint64_t nbytes = 0;
  std::uint64_t hash = 0;
};

// Hashes, then writes through file.write(std::span<const std::byte>), in pieces of at most 4 MiB. Does not commit.
// std::invalid_argument: a name twice, a size that is not what dtype and shape say, text that is not UTF-8.
void write_document(const Document& document, auto& file);

// A document in a file. The constructor reads and checks the header and the size of the file; throws DamagedFile.
class DocumentReader {
 public:
  explicit DocumentReader(std::filesystem::path path);
  DocumentReader(DocumentReader&&) noexcept;

  const std::map<std::string, std::string>& metadata() const;   // as given to write_document
  const std::vector<StoredTensor>& entries() const;              // in the order of the file
  const StoredTensor* find(std::string_view name) const;         // nullptr: not there
  bool has(std::string_view name) const;
  std::uint64_t bytes() const;                                   // of the whole file
  // Copies one tensor and checks its hash: DamagedFile. std::invalid_argument: no such tensor, another size.
  void read(std::string_view name, std::span<std::byte> out) const;
  // Reads everything and checks every hash.
  void verify() const;
};

}  // namespace frugal::inline v0::detail

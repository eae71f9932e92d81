#pragma once

#include <frugal/detail/file_descriptor.hpp>
#include <frugal/detail/safetensors_header.hpp>
#include <frugal/detail/xxhash64.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <ranges>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace frugal::inline v0::detail {

// The file is not what was written: cut, flipped, extended, unreadable, or never a document of ours. what() is one
// sentence that names the file and the place.
struct DamagedFile : std::runtime_error { using std::runtime_error::runtime_error; };

// One tensor to be written. `bytes` is memory of the caller: dense, row-major, little-endian.
struct TensorEntry {
  std::string name;
  std::string dtype;  // F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL C64 F8_E4M3 F8_E5M2 F8_E8M0
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

// What a safetensors file holds. Metadata keys that start with "frugal.xxh64" are ours. The bytes in the file stand in
// the order of `tensors`, but those of wide elements first, so that each tensor is aligned to its elements.
struct Document {
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> tensors;
};

inline constexpr std::size_t write_piece = std::size_t{4} << 20, read_piece = std::size_t{1} << 20;

// Checks that every tensor can be in a file, gives it its place, and hashes it.
inline Header header_of(const Document& document, std::span<const TensorEntry* const> in_order) {
  Header header{.metadata = document.metadata, .tensors = {}};
  for (const auto& [key, value] : document.metadata)
    if (key.starts_with(hash_key)) throw std::invalid_argument("frugal: the metadata key '" + key + "' is reserved");
  std::set<std::string_view> names{"__metadata__"};
  std::uint64_t end = 0;
  for (const TensorEntry* t : in_order) {
    if (!names.insert(t->name).second)
      throw std::invalid_argument("frugal: the name '" + t->name +
                                  "' is reserved or taken by another tensor of the file");
    if (tensor_bytes(t->dtype, t->shape) != t->bytes.size())
      throw std::invalid_argument("frugal: '" + t->name + "' has " + std::to_string(t->bytes.size()) +
                                  " bytes, and its dtype and shape say otherwise");
    header.tensors.push_back({t->name, t->dtype, t->shape, end, t->bytes.size(), xxhash64(t->bytes)});
    end += t->bytes.size();
  }
  return header;
}

// Hashes, then writes through file.write(std::span<const std::byte>) in pieces of at most 4 MiB; nothing is copied.
// Does not commit. std::invalid_argument: a name twice, a size that is not what dtype and shape say, text that is not
// UTF-8.
void write_document(const Document& document, auto& file) {
  std::vector<const TensorEntry*> in_order;
  for (const TensorEntry& t : document.tensors) {
    if (dtype_bytes(t.dtype) == 0)
      throw std::invalid_argument("frugal: '" + t.name + "' has the dtype '" + t.dtype + "', which no file can hold");
    in_order.push_back(&t);
  }
  std::ranges::stable_sort(in_order, std::greater{}, [](const TensorEntry* t) { return dtype_bytes(t->dtype); });
  const std::string header = encode_header(header_of(document, in_order));
  if (header.size() > longest_header) throw std::invalid_argument("frugal: names and metadata of a file exceed 100 MB");
  const auto write = [&](std::span<const std::byte> bytes) {
    for (; !bytes.empty(); bytes = bytes.subspan(std::min(write_piece, bytes.size())))
      file.write(bytes.first(std::min(write_piece, bytes.size())));
  };
  write(std::as_bytes(std::span(header)));
  for (const TensorEntry* t : in_order) write(t->bytes);
}

// A document in a file. The constructor reads and checks the header and the size of the file: DamagedFile;
// std::system_error if this process lacks descriptors or memory, which says nothing about the file.
class DocumentReader {
 public:
  explicit DocumentReader(std::filesystem::path path)
      : path_(std::move(path)), file_(path_, O_RDONLY | O_NONBLOCK) {  // a pipe of that name must not block
    struct stat status{};
    if (!file_.is_open() || ::fstat(file_.get(), &status) != 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) throw_file_error("frugal", "open", path_);
      fail(std::string("cannot be opened: ") + std::strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) fail("is no regular file");
    bytes_ = static_cast<std::uint64_t>(status.st_size);
    const std::string text = read_header();
    try {
      header_ = parse_header(std::string_view(text).substr(length_bytes), bytes_ - data_);
    } catch (const std::runtime_error& error) { fail(std::string("is damaged: ") + error.what()); }
    for (const StoredTensor& tensor : header_.tensors) by_name_.emplace(tensor.name, &tensor);
  }
  DocumentReader(DocumentReader&&) noexcept = default;

  // As given to write_document.
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  // In the order of their bytes.
  const std::vector<StoredTensor>& entries() const { return header_.tensors; }
  // nullptr: no such tensor.
  const StoredTensor* find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }
  bool has(std::string_view name) const { return find(name) != nullptr; }
  // Size of the whole file.
  std::uint64_t bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }

  // Copies one tensor and checks its hash: DamagedFile. std::invalid_argument: no such tensor, another size.
  void read(std::string_view name, std::span<std::byte> out) const {
    const StoredTensor* tensor = find(name);
    if (!tensor || tensor->nbytes != out.size())
      throw std::invalid_argument("frugal: '" + path_.string() + "' has no tensor '" + std::string(name) + "' of " +
                                  std::to_string(out.size()) + " bytes");
    read_and_check(*tensor, [&](std::uint64_t at, std::size_t size) { return out.subspan(at, size); });
  }

  // Reads everything and checks every hash.
  void verify() const {
    const auto buffer = std::make_unique_for_overwrite<std::byte[]>(read_piece);
    for (const StoredTensor& tensor : header_.tensors)
      read_and_check(tensor, [&](std::uint64_t, std::size_t size) { return std::span(buffer.get(), size); });
  }

 private:
  // Length and text, with their hash checked. What it allocates is never more than the file has.
  std::string read_header() {
    std::uint64_t length = 0;
    if (bytes_ < hash_at + hash_digits) fail("is damaged: it ends inside its header");
    read_bytes(0, std::as_writable_bytes(std::span(&length, 1)));
    if (length > bytes_ - length_bytes) fail("is damaged: it ends inside its header");
    if (length_bytes + length < hash_at + hash_digits || length > longest_header)
      fail("is damaged: the length of its header is impossible");
    data_ = length_bytes + length;
    std::string text(data_, '\0');
    read_bytes(0, std::as_writable_bytes(std::span(text)));
    const std::string_view start = std::string_view(text).substr(length_bytes, header_start.size());
    if (start != header_start || text.compare(hash_at, hash_digits, hash_text(hash_of_header(text))) != 0)
      fail("is damaged: its header does not have its hash");
    return text;
  }

  // Piece by piece, so that the hash finds the bytes in the cache.
  void read_and_check(const StoredTensor& tensor, auto&& piece_of) const {
    Xxhash64 hash;
    for (std::uint64_t at = 0; at < tensor.nbytes;) {
      const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(read_piece, tensor.nbytes - at));
      const std::span<std::byte> piece = piece_of(at, size);
      read_bytes(data_ + tensor.begin + at, piece);
      hash.update(piece);
      at += size;
    }
    if (hash.value() != tensor.hash) fail("is damaged: the tensor '" + tensor.name + "' does not have its hash");
  }

  void read_bytes(std::uint64_t at, std::span<std::byte> out) const {
    const std::int64_t got = file_.read_at(at, out);
    if (got < 0) fail(std::string("cannot be read: ") + std::strerror(errno));
    if (static_cast<std::size_t>(got) != out.size()) fail("is damaged: it became shorter while it was read");
  }

  [[noreturn]] void fail(const std::string& what) const { throw DamagedFile("'" + path_.string() + "' " + what); }

  std::filesystem::path path_;
  FileDescriptor file_;
  std::uint64_t bytes_ = 0, data_ = 0;
  Header header_;
  std::unordered_map<std::string_view, const StoredTensor*> by_name_;  // into header_, which keeps its place when moved
};

}  // namespace frugal::inline v0::detail

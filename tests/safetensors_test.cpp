#include "support/catch.hpp"
#include "support/documents.hpp"
#include "support/temporary_directory.hpp"

#include <frugal/detail/safetensors.hpp>

#include <sys/resource.h>
#include <sys/stat.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace {

using namespace frugal::detail;
namespace fs = std::filesystem;

// A file in memory that remembers how it was written.
struct MemoryFile {
  std::vector<std::size_t> pieces = {};
  std::string content = {};
  void write(std::span<const std::byte> bytes) {
    pieces.push_back(bytes.size());
    content.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
};

std::string encoded(const Document& document) {
  MemoryFile file;
  write_document(document, file);
  return file.content;
}

template <class Value>
std::vector<Value> read(const DocumentReader& reader, std::string_view name) {
  std::vector<Value> out(reader.find(name)->nbytes / sizeof(Value));
  reader.read(name, std::as_writable_bytes(std::span(out)));
  return out;
}

// Opens `content` as a file and reads all of it. Empty: it is sound; else the text of the error.
std::string problem_of(const fs::path& path, const std::string& content) {
  write_text(path, content);
  try {
    DocumentReader(path).verify();
    return {};
  } catch (const DamagedFile& damage) { return damage.what(); }
}

std::string with_header(std::string text, const std::string& data) {
  std::string content(8, '\0');
  const std::uint64_t length = text.size();
  std::memcpy(content.data(), &length, 8);
  content += text;
  content.replace(hash_at, hash_digits, hash_text(hash_of_header(content)));
  return content + data;
}

const std::string prefix = std::string(header_start) + std::string(16, '0') + '"';

}  // namespace

TEST_CASE("a document comes back as it went", "[safetensors]") {
  const TemporaryDirectory folder;
  const OwnedDocument owned = small_document();
  store(owned.document, folder / "a.safetensors");
  DocumentReader opened(folder / "a.safetensors");
  const DocumentReader reader = std::move(opened);

  CHECK(reader.metadata() == owned.document.metadata);
  CHECK(reader.bytes() == fs::file_size(folder / "a.safetensors"));
  REQUIRE(reader.entries().size() == owned.document.tensors.size());
  for (const TensorEntry& tensor : owned.document.tensors) {
    REQUIRE(reader.has(tensor.name));
    const StoredTensor& stored = *reader.find(tensor.name);
    CHECK(stored.dtype == tensor.dtype);
    CHECK(stored.shape == tensor.shape);
    CHECK(stored.nbytes == tensor.bytes.size());
    CHECK(std::ranges::equal(read<std::byte>(reader, tensor.name), tensor.bytes));
  }
  CHECK(read<std::int64_t>(reader, "step") == std::vector<std::int64_t>{-77});
  CHECK_FALSE(reader.has("step "));
  reader.verify();
}

TEST_CASE("an empty document is a document", "[safetensors]") {
  const TemporaryDirectory folder;
  store({}, folder / "a");
  const DocumentReader reader(folder / "a");
  CHECK(reader.metadata().empty());
  CHECK(reader.entries().empty());
  reader.verify();
}

TEST_CASE("every tensor is aligned to its elements, and the data to 64 bytes", "[safetensors]") {
  const TemporaryDirectory folder;
  store(small_document().document, folder / "a");
  const DocumentReader reader(folder / "a");
  for (const StoredTensor& tensor : reader.entries()) CHECK(tensor.begin % dtype_bytes(tensor.dtype) == 0);
  std::uint64_t length = 0;
  std::memcpy(&length, read_text(folder / "a").data(), 8);
  CHECK((length + 8) % 64 == 0);
}

TEST_CASE("large tensors go in pieces, without a byte lost", "[safetensors]") {
  OwnedDocument owned;
  std::vector<std::uint32_t> values((9 << 20) / 4 + 1);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint32_t>(i * 2654435761u);
  owned.add("large", "U32", {static_cast<std::int64_t>(values.size())}, values);
  owned.add<std::uint8_t>("small", "U8", {1}, {7});
  MemoryFile file;
  write_document(owned.document, file);
  CHECK(file.pieces.size() == 5);
  for (const std::size_t piece : file.pieces) CHECK(piece <= std::size_t{4} << 20);

  const TemporaryDirectory folder;
  write_text(folder / "a", file.content);
  const DocumentReader reader(folder / "a");
  CHECK(read<std::uint32_t>(reader, "large") == values);
  reader.verify();
  std::string damaged = file.content;
  damaged[damaged.size() - 2] ^= 1;  // the last byte of the last piece
  CHECK_THAT(problem_of(folder / "a", damaged), ContainsSubstring("'large' does not have its hash"));
}

TEST_CASE("every flipped bit is noticed", "[safetensors]") {
  const TemporaryDirectory folder;
  const std::string sound = encoded(small_document().document);
  REQUIRE(problem_of(folder / "a", sound).empty());
  REQUIRE(sound.find("}} ") != std::string::npos);  // spaces at the end of the header are among them
  std::size_t missed = 0;
  for (std::size_t at = 0; at < sound.size(); ++at)
    for (const int flip : {0x01, 0x20, 0x29, 0x80, 0xff}) {  // 0x20: the case of letters; 0x29: a space to a tab
      std::string damaged = sound;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      if (problem_of(folder / "a", damaged).empty()) ++missed;
    }
  CHECK(missed == 0);
}

TEST_CASE("a flipped byte of a tensor is noticed by whoever reads that tensor", "[safetensors]") {
  const TemporaryDirectory folder;
  std::string damaged = encoded(small_document().document);
  damaged.back() ^= 1;  // in the narrowest tensor
  write_text(folder / "a", damaged);
  const DocumentReader reader(folder / "a");  // the header is right
  CHECK(read<std::int64_t>(reader, "step") == std::vector<std::int64_t>{-77});
  CHECK_THROWS_AS(read<std::uint8_t>(reader, "flags"), DamagedFile);
  CHECK_THROWS_WITH(reader.verify(),
                    ContainsSubstring((folder / "a").string()) && ContainsSubstring("'flags' does not have its hash"));
}

TEST_CASE("every truncation, and whatever is appended, is noticed when the file is opened", "[safetensors]") {
  const TemporaryDirectory folder;
  const std::string sound = encoded(small_document().document);
  for (std::size_t size = 0; size < sound.size(); ++size) {
    write_text(folder / "a", sound.substr(0, size));
    CHECK_THROWS_AS(DocumentReader(folder / "a"), DamagedFile);
  }
  for (const std::string& more : {std::string(1, '\0'), std::string(" "), std::string(4096, '\0'), sound}) {
    write_text(folder / "a", sound + more);
    CHECK_THROWS_WITH(DocumentReader(folder / "a"), ContainsSubstring("bytes of data instead of"));
  }
}

TEST_CASE("a header that claims to be huge is an error and no allocation", "[safetensors]") {
  const TemporaryDirectory folder;
  std::string content = encoded(small_document().document);
  for (const std::uint64_t length :
       {UINT64_MAX, UINT64_MAX - 7, std::uint64_t{1} << 63, std::uint64_t{1} << 40, std::uint64_t{content.size()},
        std::uint64_t{content.size() - 7}, std::uint64_t{0}, std::uint64_t{40}}) {
    std::memcpy(content.data(), &length, 8);
    CHECK_THAT(problem_of(folder / "a", content),
               ContainsSubstring(length > 40 ? "ends inside its header" : "impossible"));
  }
  const std::uint64_t sparse = 200'000'000;  // the file has these bytes, on paper
  std::memcpy(content.data(), &sparse, 8);
  write_text(folder / "a", content);
  fs::resize_file(folder / "a", 300'000'000);
  CHECK_THROWS_WITH(DocumentReader(folder / "a"), ContainsSubstring("impossible"));
}

TEST_CASE("what is no readable file is an error that says so", "[safetensors]") {
  const TemporaryDirectory folder;
  CHECK_THROWS_WITH(DocumentReader(folder / "none"), ContainsSubstring("cannot be opened: No such file"));
  fs::create_directory(folder / "directory");
  CHECK_THROWS_WITH(DocumentReader(folder / "directory"), ContainsSubstring("is no regular file"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK_THROWS_WITH(DocumentReader(folder / "pipe"), ContainsSubstring("is no regular file"));
  CHECK_FALSE(problem_of(folder / "text", std::string(1000, 'x')).empty());
}

TEST_CASE("a process without free descriptors does not call files damaged", "[safetensors]") {
  const TemporaryDirectory folder;
  store(small_document().document, folder / "a");
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{3, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  std::string what;
  try {
    const DocumentReader reader(folder / "a");
  } catch (const std::system_error& error) { what = error.what(); } catch (const DamagedFile&) {
    what = "damaged";
  }
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK_THAT(what, ContainsSubstring("frugal: cannot open"));
}

TEST_CASE("a file that shrinks under its reader is an error", "[safetensors]") {
  const TemporaryDirectory folder;
  store(small_document().document, folder / "a");
  const DocumentReader reader(folder / "a");
  fs::resize_file(folder / "a", reader.bytes() - 1);
  CHECK_THROWS_WITH(reader.verify(), ContainsSubstring("became shorter"));
}

TEST_CASE("reading a tensor that is not there, or into another size, is a mistake of the caller", "[safetensors]") {
  const TemporaryDirectory folder;
  store(small_document().document, folder / "a");
  const DocumentReader reader(folder / "a");
  std::byte bytes[7];
  CHECK_THROWS_AS(reader.read("nobody", bytes), std::invalid_argument);
  CHECK_THROWS_AS(reader.read("step", bytes), std::invalid_argument);
}

TEST_CASE("what the format cannot hold is refused before a byte is written", "[safetensors]") {
  const float value[2] = {1, 2};
  const auto bytes = std::as_bytes(std::span(value));
  const auto refused = [](Document document, const std::string& why) {
    MemoryFile file;
    CHECK_THROWS_WITH(write_document(document, file), ContainsSubstring(why));
    CHECK(file.pieces.empty());
  };
  refused({{}, {{"a", "F32", {2}, bytes}, {"a", "F32", {2}, bytes}}}, "taken");
  refused({{}, {{"__metadata__", "F32", {2}, bytes}}}, "reserved");
  refused({{{"frugal.xxh64.a", "0"}}, {}}, "reserved");
  refused({{}, {{"a", "F4", {2}, bytes}}}, "F4");
  refused({{}, {{"a", "F32", {3}, bytes}}}, "8 bytes");
  refused({{}, {{"a", "F32", {-2}, bytes}}}, "impossible");
  refused({{}, {{"a", "F32", {INT64_MAX, INT64_MAX}, bytes}}}, "impossible");
  refused({{}, {{"a\xff", "F32", {2}, bytes}}}, "UTF-8");
  refused({{{"key", "\xff"}}, {}}, "UTF-8");
}

TEST_CASE("a header that is forged with a right hash is still read strictly", "[safetensors]") {
  const TemporaryDirectory folder;
  const std::string hash = hash_text(xxhash64(std::as_bytes(std::span("abcd", 4))));
  const std::string tensors_hashes = ",\"frugal.xxh64.a\":\"" + hash + "\",\"frugal.xxh64.b\":\"" + hash + "\"}";
  const std::string start = prefix + tensors_hashes, a = R"(,"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})",
                    b = R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]})";
  const auto problem = [&](const std::string& text, const std::string& data = "abcdabcd") {
    return problem_of(folder / "a", with_header(text, data));
  };
  REQUIRE(problem(start + a + b + "}").empty());
  REQUIRE(problem(start + b + a + "}  \n").empty());

  const auto refused = [&](const std::string& tensor, const std::string& why) {
    INFO(tensor);
    CHECK_THAT(problem(start + a + tensor + "}"), ContainsSubstring(why));
  };
  refused(a, "comes twice");
  refused(R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]})", "overlap");
  refused(R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})", "overlap");
  refused(R"(,"b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]})", "hole");
  refused(R"(,"b":{"dtype":"U8","shape":[5],"data_offsets":[4,9]})", "bytes of data instead of");
  refused(R"(,"b":{"dtype":"U8","shape":[3],"data_offsets":[4,8]})", "another size");
  refused(R"(,"b":{"dtype":"U8","shape":[4611686018427387904,4],"data_offsets":[4,8]})", "impossible");
  refused(R"(,"b":{"dtype":"U8","shape":[-4],"data_offsets":[4,8]})", "integer");
  refused(R"(,"b":{"dtype":"X8","shape":[4],"data_offsets":[4,8]})", "not known");
  refused(R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[8,4]})", "no range");
  refused(R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[4]})", "no range");
  refused(R"(,"b":{"dtype":"U8","shape":[4]})", "lacks");
  refused(R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8],"more":[1]})", "unknown field");
  refused(R"(,"c":{"dtype":"U8","shape":[4],"data_offsets":[4,8]})", "'c' has no hash");
  std::string other_key = start + a + b + "}";
  other_key.replace(other_key.find("xxh64"), 5, "xxh32");
  CHECK_THAT(problem(other_key), ContainsSubstring("its header does not have its hash"));
  CHECK_THAT(problem(start + a + b + "}}"), ContainsSubstring("follows the end"));
  CHECK_THAT(problem(start + a + b), ContainsSubstring("expected '}'"));
  CHECK_THAT(problem(prefix + ",\"key\":1}}", ""), ContainsSubstring("expected '\"'"));
  CHECK_THAT(problem(prefix + "}" + a + "}", "abcd"), ContainsSubstring("'a' has no hash"));
  CHECK_THAT(problem(prefix + ",\"frugal.xxh64.a\":\"000000000000000g\"}" + a + "}", "abcd"),
             ContainsSubstring("no hash"));
  CHECK_THAT(problem(prefix + ",\"k\":\"1\",\"k\":\"2\"}}", ""), ContainsSubstring("comes twice"));
}

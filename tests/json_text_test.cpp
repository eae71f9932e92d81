#include "support/catch.hpp"

#include <frugal/detail/json_text.hpp>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

using frugal::detail::append_json_string;
using frugal::detail::JsonReader;

std::string written(std::string_view text) {
  std::string out;
  append_json_string(out, text);
  return out;
}
std::string read(std::string_view json) {
  JsonReader reader(json);
  std::string text = reader.string();
  reader.end();
  return text;
}
std::vector<std::int64_t> numbers(std::string_view json) {
  JsonReader reader(json);
  std::vector<std::int64_t> out;
  reader.array([&] { out.push_back(reader.integer()); });
  reader.end();
  return out;
}

using namespace std::string_literals;

}  // namespace

TEST_CASE("strings come back as they went, whatever is in them", "[json]") {
  CHECK(written("fc.weight") == R"("fc.weight")");
  CHECK(written("a\"b\\c\n\x01\x1f") == R"("a\"b\\c\u000a\u0001\u001f")");
  for (const std::string& text : {""s, "plain"s, "\"\\/"s, "\0\x01\x1f\x7f"s, "gr\u00fc\u00dfe \u20ac \U0001F600"s,
                                  "\u0080\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"s})
    CHECK(read(written(text)) == text);
}

TEST_CASE("all escapes are understood", "[json]") {
  CHECK(read(R"("\"\\\/\b\f\n\r\t")") == "\"\\/\b\f\n\r\t");
  CHECK(read(R"("\u0041\u00e9\u20AC\u0000")") == "A\u00e9\u20ac\0"s);
  CHECK(read(R"("\ud83d\uDE00")") == "\U0001F600");
  CHECK(read(" \t\r\n\"x\" \n") == "x");
}

TEST_CASE("what is no JSON string is refused", "[json]") {
  for (const std::string& json : {""s,
                                  "x"s,
                                  "\""s,
                                  "\"abc"s,
                                  "\"\\"s,
                                  "\"\\\""s,
                                  R"("\x")"s,
                                  R"("\u12")"s,
                                  R"("\u12g4")"s,
                                  R"("\u-123")"s,
                                  "\"\\u123"s,
                                  R"("\ud83d")"s,
                                  R"("\ud83dx")"s,
                                  R"("\ud83dA")"s,
                                  R"("\ude00")"s,
                                  "\"\n\""s,
                                  "\"\x01\""s,
                                  "\"\0\""s,
                                  "\"a\" \"b\""s,
                                  "\"\x80\""s,
                                  "\"\xc0\xaf\""s,
                                  "\"\xc1\xbf\""s,
                                  "\"\xe0\x80\x80\""s,
                                  "\"\xed\xa0\x80\""s,
                                  "\"\xf0\x80\x80\x80\""s,
                                  "\"\xf4\x90\x80\x80\""s,
                                  "\"\xf5\x80\x80\x80\""s,
                                  "\"\xff\""s,
                                  "\"\xe2\x82\""s,
                                  "\"\xc3\""s,
                                  "\"\xc3"s}) {
    INFO(json);
    CHECK_THROWS_AS(read(json), std::runtime_error);
  }
}

TEST_CASE("text that is not UTF-8 is never written", "[json]") {
  for (const std::string& text : {"\x80"s, "a\xff"s, "\xe2\x82"s, "\xed\xa0\x80"s}) {
    std::string out;
    CHECK_THROWS_AS(append_json_string(out, text), std::invalid_argument);
  }
}

TEST_CASE("integers from 0 to 2^63 - 1, and nothing else", "[json]") {
  CHECK(numbers("[]").empty());
  CHECK(numbers(" [ 0 , 10,9223372036854775807 ] ") == std::vector<std::int64_t>{0, 10, INT64_MAX});
  for (const char* json : {"",
                           "[",
                           "[1",
                           "[1,",
                           "[1,]",
                           "[,1]",
                           "[-1]",
                           "[+1]",
                           "[01]",
                           "[1.0]",
                           "[1e3]",
                           "[9223372036854775808]",
                           "[99999999999999999999999]",
                           "[1 2]",
                           "[true]",
                           "[\"1\"]",
                           "[[1]]",
                           "[1]]",
                           "1",
                           "{}"}) {
    INFO(json);
    CHECK_THROWS_AS(numbers(json), std::runtime_error);
  }
}

TEST_CASE("an object gives its members, and refuses a key that comes twice", "[json]") {
  const auto members = [](std::string_view json) {
    JsonReader reader(json);
    std::string out;
    reader.object([&](const std::string& key) { out += key + "=" + reader.string() + ";"; });
    reader.end();
    return out;
  };
  CHECK(members("{}").empty());
  CHECK(members(R"( { "b" : "1" , "a":"2" } )") == "b=1;a=2;");
  CHECK_THROWS_WITH(members(R"({"a":"1","a":"2"})"), ContainsSubstring("\"a\" comes twice"));
  CHECK_THROWS_WITH(members(R"({"a":"1","\u0061":"2"})"), ContainsSubstring("comes twice"));
  for (const char* json : {"{", "{\"a\"", "{\"a\":", "{\"a\":\"1\"", "{\"a\":\"1\",", "{\"a\":\"1\",}", "{a:\"1\"}",
                           "{\"a\" \"1\"}", "{\"a\":1}", "{\"a\":null}", "{}{}", "[]"}) {
    INFO(json);
    CHECK_THROWS_AS(members(json), std::runtime_error);
  }
}

#include "support/catch.hpp"
#include "support/documents.hpp"
#include "support/temporary_directory.hpp"

#include <cstdlib>
#include <string>

// Needs python3 with the packages safetensors and numpy; ctest reports the test as skipped where they are missing.
TEST_CASE("Python's safetensors opens our files", "[safetensors]") {
  if (std::system("python3 -c 'import safetensors.numpy' 2> /dev/null") != 0) {
    WARN("skipped: python3 cannot import safetensors and numpy");
    return;
  }
  const TemporaryDirectory folder;
  OwnedDocument owned = small_document();
  owned.document.tensors.erase(owned.document.tensors.begin() + 4);  // bfloat16: numpy has none
  store(owned.document, folder / "a.safetensors");
  write_text(folder / "check.py", R"(
import struct, sys
from safetensors import safe_open
from safetensors.numpy import load_file
path = sys.argv[1]
t = load_file(path)
assert sorted(t) == sorted(["flags", "fc.weight", "step", "empty", 'od"d\n\u00e9']), t.keys()
assert t["flags"].dtype == bool and t["flags"].tolist() == [True, False, True]
assert t["fc.weight"].shape == (2, 3) and t["fc.weight"].dtype == "float32"
assert t["fc.weight"].flatten().tolist()[:3] == [1, -2, 3.5]
assert t["step"].shape == () and int(t["step"]) == -77
assert t["empty"].shape == (0, 5)
assert t['od"d\n\u00e9'].tolist() == [0.1]
with safe_open(path, "np") as f:
    m = f.metadata()
assert m["epoch"] == "3" and m['quote " and \\'] == "line\nbreak" and m["gr\u00fc\u00dfe"] == "\U0001F600"
assert len(m["frugal.xxh64"]) == 16 and len(m["frugal.xxh64.step"]) == 16
try:
    import xxhash
except ImportError:
    sys.exit(0)
raw = open(path, "rb").read()
header = 8 + struct.unpack("<Q", raw[:8])[0]
at = raw.index(b'"frugal.xxh64":"') + len('"frugal.xxh64":"')
assert xxhash.xxh64(raw[:at] + b"0" * 16 + raw[at + 16:header]).hexdigest() == m["frugal.xxh64"]
assert xxhash.xxh64(t["fc.weight"].tobytes()).hexdigest() == m["frugal.xxh64.fc.weight"]
)");
  const std::string command =
      "python3 '" + (folder / "check.py").string() + "' '" + (folder / "a.safetensors").string() + "'";
  CHECK(std::system(command.c_str()) == 0);
}

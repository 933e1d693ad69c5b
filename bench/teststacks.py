"""Five language stacks: a real image of each, and a real test run in it."""

from msgspec import Struct

__all__ = ["STACKS", "Stack"]

PYTHON = """
mkdir -p /tmp/p && cd /tmp/p && cat > test_frames.py <<'END'
import numpy, pandas, scipy.optimize
def test_solve():
    a = numpy.random.default_rng(1).random((50, 50))
    assert numpy.allclose(a @ numpy.linalg.inv(a), numpy.eye(50))
def test_group():
    frame = pandas.DataFrame({"k": list("abab"), "v": range(4)})
    assert frame.groupby("k").v.sum().to_dict() == {"a": 2, "b": 4}
def test_root():
    assert abs(scipy.optimize.brentq(lambda x: x * x - 2, 0, 2) - 2**0.5) < 1e-9
END
python3 -m pytest -q test_frames.py
"""
NODE = """
mkdir -p /tmp/n && cd /tmp/n && echo '{"name": "n", "version": "1.0.0"}' > package.json && cat > sum.test.js <<'END'
const sum = (...all) => all.reduce((a, b) => a + b, 0);
test('adds', () => { expect(sum(1, 2, 3)).toBe(6); });
test('nothing', () => { expect(sum()).toBe(0); });
END
jest --ci 2>&1
"""
JAVA = """
mkdir -p /tmp/j && cd /tmp/j && cat > SumTest.java <<'END'
import static org.junit.Assert.assertEquals;
import java.util.stream.IntStream;
import org.junit.Test;
public class SumTest {
    @Test public void adds() { assertEquals(55, IntStream.rangeClosed(1, 10).sum()); }
    @Test public void joins() { assertEquals("a,b", String.join(",", "a", "b")); }
}
END
javac -cp /usr/share/java/junit4.jar SumTest.java && java -cp .:/usr/share/java/junit4.jar:/usr/share/java/hamcrest-core.jar org.junit.runner.JUnitCore SumTest
"""
GO = """
mkdir -p /tmp/g && cd /tmp/g && export HOME=/tmp GOFLAGS=-mod=mod GOTOOLCHAIN=local && cat > go.mod <<'END'
module example.test/sum
go 1.19
END
cat > sum_test.go <<'END'
package sum
import ("strings"; "testing")
func Sum(all ...int) (total int) { for _, n := range all { total += n }; return }
func TestSum(t *testing.T) { if Sum(1, 2, 3) != 6 { t.Fatal("sum") } }
func TestFields(t *testing.T) { if len(strings.Fields("a b c")) != 3 { t.Fatal("fields") } }
END
go test ./...
"""
RUST = """
mkdir -p /tmp/r/src && cd /tmp/r && export HOME=/tmp && cat > Cargo.toml <<'END'
[package]
name = "sum"
version = "0.1.0"
edition = "2021"
END
cat > src/lib.rs <<'END'
pub fn sum(all: &[i64]) -> i64 { all.iter().sum() }
#[cfg(test)]
mod tests {
    #[test] fn adds() { assert_eq!(super::sum(&[1, 2, 3]), 6); }
    #[test] fn nothing() { assert_eq!(super::sum(&[]), 0); }
}
END
cargo test --offline 2>&1
"""


class Stack(Struct, frozen=True):
    """`image`: its name in the table of real images; `script`: what a shell runs, and prints something when it passes."""

    image: str
    script: str
    memory_mb: int = 2048

    @property
    def command(self) -> list[str]:
        """The run's argv."""
        return ["sh", "-ec", self.script]


STACKS = {
    "python": Stack("python-science", PYTHON), "node": Stack("node-tools", NODE), "java": Stack("jdk-17", JAVA),
    "go": Stack("go-1-19", GO), "rust": Stack("rust-1-63", RUST),
}  # fmt: skip

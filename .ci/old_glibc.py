"""Make a folder that gcc can build against with `--sysroot`: an old glibc, and this gcc's libstdc++.

Usage: python .ci/old_glibc.py FOLDER 2.28      (needs gcc, binutils, and ziglang 0.14 from PyPI)

Libraries run on any glibc that is not older than the one they were linked with. Zig carries the headers and
the symbols of every glibc, so this needs no old Linux. What is newer in gcc's libstdc++ than in the old
system's is linked statically; Red Hat's gcc toolsets, which build PyTorch's wheels, do the same.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

# the newest versions of symbols that a system with glibc 2.28 has, as PEP 600's policy for it lists them
NEWEST = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}


def gcc_says(*question: str) -> str:
    """What g++ prints for an option such as -dumpversion."""
    return subprocess.run(["g++", *question], check=True, capture_output=True, text=True).stdout.strip()


def zig_says(libraries: Path, glibc: str) -> str:
    """Has Zig link a library against an old glibc; returns the commands that it runs."""
    source = libraries / "empty.c"
    source.touch()
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"x86_64-linux-gnu.{glibc}", "-v", "-shared"]
    command += ["-O2", str(source), "-o", str(libraries / "empty.so"), "-lm", "-lpthread", "-ldl", "-lrt"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def copy_headers(include: Path, said: str, glibc: str) -> None:
    """Copies glibc's headers from Zig's package and the C++ headers of g++."""
    folders = dict.fromkeys(re.findall(r"-isystem (\S+/libc/include/\S+)", said))
    for folder in reversed(folders):  # the first in a search path wins
        shutil.copytree(folder, include, dirs_exist_ok=True)
    # libstdc++ would use a variable of glibc 2.32
    (include / "sys/single_threaded.h").unlink()
    features = include / "features.h"
    features.write_text(f"#define __GLIBC_MINOR__ {glibc.split('.')[1]}\n{features.read_text()}")
    release = Path("c++") / gcc_says("-dumpversion")
    for own in (release, Path(gcc_says("-dumpmachine")) / release):
        shutil.copytree(Path("/usr/include") / own, include / own)


def copy_glibc(libraries: Path, said: str) -> None:
    """Copies Zig's libraries, which hold glibc's symbols and no code, under the names that gcc looks for."""
    for word in said.splitlines()[-1].split():
        if match := re.search(r"/(lib\w+)\.(so\.\d|a)$", word):
            shutil.copy(word, libraries)
            if match[2] != "a":
                (libraries / f"{match[1]}.so").symlink_to(Path(word).name)
    (libraries / "libc.so").unlink()
    # threads and dlopen are parts of libc only since glibc 2.34
    others = "libpthread.so.0 libdl.so.2 librt.so.1 libld.so.2"
    (libraries / "libc.so").write_text(f"GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( {others} ) )\n")


def old_symbols(library: str) -> dict[str, list[str]]:
    """The symbols of libstdc++.so by version, without those that are newer than `NEWEST`."""
    listing = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
    pattern = r" (\w) (\w+)@@(GLIBCXX|CXXABI)_([\d.]+)$"
    found: dict[str, list[str]] = {}
    for kind, name, family, number in re.findall(pattern, listing, re.M):
        if tuple(map(int, number.split("."))) <= NEWEST[family]:
            found.setdefault(f"{family}_{number}", []).append(f"{name} {kind}")
    return found


def copy_libstdcxx(libraries: Path) -> None:
    """Makes a libstdc++.so.6 of old symbols without code, behind which the linker looks into libstdc++.a."""
    source, versions = libraries / "stdc++.s", libraries / "stdc++.map"
    symbols = old_symbols(gcc_says("-print-file-name=libstdc++.so"))
    script, code = "", ".text\n"
    for version, entries in symbols.items():
        names = [entry.split()[0] for entry in entries]
        script += f"{version} {{ {' '.join(f'{name};' for name in names)} }};\n"
        for name, kind in map(str.split, entries):
            what = "function" if kind in "TWi" else "object"
            code += f".globl {name}\n.type {name}, @{what}\n{name}: .byte 0\n.size {name}, 1\n"
    source.write_text(code)
    versions.write_text(script)
    flags = ["-shared", "-nostdlib", f"-Wl,--version-script={versions}", "-Wl,-soname,libstdc++.so.6"]
    subprocess.run(["gcc", *flags, str(source), "-o", str(libraries / "libstdc++.so.6")], check=True)
    shutil.copy(gcc_says("-print-file-name=libstdc++.a"), libraries / "libstdc++_newer.a")
    (libraries / "libstdc++.so").write_text("INPUT ( libstdc++.so.6 libstdc++_newer.a )\n")


def make_sysroot(folder: Path, glibc: str) -> None:
    """Makes `folder` anew. Raises CalledProcessError if gcc, ar or Zig fails."""
    shutil.rmtree(folder, ignore_errors=True)
    libraries = folder / "usr/lib"
    libraries.mkdir(parents=True)
    said = zig_says(libraries, glibc)
    copy_headers(folder / "usr/include", said, glibc)
    copy_glibc(libraries, said)
    copy_libstdcxx(libraries)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    make_sysroot(Path(sys.argv[1]).resolve(), sys.argv[2])

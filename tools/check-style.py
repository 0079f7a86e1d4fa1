#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check what every file must look like: licence line, white space, format, no stray calls.

Rules that a compiler cannot know. The format is that of clang-format 14; with another version that
one rule is left out, because versions differ.
"""
import pathlib
import re
import shutil
import subprocess
import sys

CODE = {".c", ".h", ".cpp", ".cu", ".cuh"}
TEXT = CODE | {".inc", ".py", ".sh", ".cmake", ".md", ".txt", ".json", ".map"}
MAX_LINES = 900
FORMATTER_MAJOR = "14"

# (pattern, where it counts, where it is allowed, what to do instead)
CALLS = [
    (r"\b(?:malloc|calloc|realloc|free|strdup|aligned_alloc|posix_memalign)\s*\(",
     "src/", ("src/base/mem.c", "src/cli/"), "use sl_alloc and its kin (base/mem.h)"),
    (r"\b(?:printf|puts|fprintf|fputs|perror)\s*\(",
     "src/", ("src/cli/", "src/base/mem.c"), "the library does not print; use sl_log or an error"),
    (r"\b(?:exit|_exit|abort|quick_exit)\s*\(",
     "src/", ("src/cli/", "src/base/mem.c"), "the library does not end the program"),
    (r"\b(?:strcpy|strcat|sprintf|gets|strtok)\s*\(",
     "src/", (), "use a function that knows the size"),
]
COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def tracked_files(root):
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True).stdout
    names = {name.decode() for name in listed.split(b"\0") if name}
    return sorted(name for name in names if (root / name).is_file())


def check_text(name, text):
    problems = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            problems.append(f"{name}:{number}: blanks at the end of the line")
        if "\t" in line and not name.endswith(("Makefile", ".tsv")):
            problems.append(f"{name}:{number}: tab")
    if text and not text.endswith("\n"):
        problems.append(f"{name}: no newline at the end")
    if name.startswith("tools/fixtures/"):  # nasty text is their purpose
        return problems
    for character in sorted(set(text)):
        if character in "\u200b\u200c\u200d\u2060\ufeff\u00a0" or "\u202a" <= character <= "\u202e":
            problems.append(f"{name}: invisible character U+{ord(character):04X}")
    return problems


def check_code(name, text):
    problems = []
    if len(text.split("\n")) > MAX_LINES:
        problems.append(f"{name}: more than {MAX_LINES} lines")
    # Blank comments and strings out, keeping the line numbers.
    bare = COMMENT_OR_STRING.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    if re.search(r"^\s*#\s*if\s+0\b", bare, re.MULTILINE):
        problems.append(f"{name}: dead code in #if 0")
    for pattern, where, allowed, advice in CALLS:
        if not name.startswith(where) or name.startswith(allowed or ("\0",)):
            continue
        for match in re.finditer(pattern, bare):
            number = bare.count("\n", 0, match.start()) + 1
            problems.append(f"{name}:{number}: {match.group().rstrip('( ')}: {advice}")
    return problems


def check_format(root, names):
    tool = shutil.which("clang-format-" + FORMATTER_MAJOR) or shutil.which("clang-format")
    if not tool:
        print("style: clang-format is not there; the format was not checked")
        return []
    version = subprocess.run([tool, "--version"], check=True, capture_output=True, text=True).stdout
    if f"version {FORMATTER_MAJOR}." not in version:
        print(f"style: the format was not checked, that takes clang-format {FORMATTER_MAJOR}")
        return []
    problems = []
    for at in range(0, len(names), 40):
        run = subprocess.run([tool, "--dry-run", "-Werror", *names[at:at + 40]],
                             cwd=root, capture_output=True, text=True)
        bad = re.findall(r"^(\S+?):\d+:\d+: error: code should be clang-formatted", run.stderr,
                         re.MULTILINE)
        problems += [f"{name}: not formatted; run 'make format'" for name in sorted(set(bad))]
        if run.returncode and not bad:
            problems.append(run.stderr.strip())
    return problems


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    problems = []
    code = []
    for name in tracked_files(root):
        suffix = pathlib.Path(name).suffix
        plain = pathlib.Path(name).name in ("Makefile", "CMakeLists.txt", ".clang-format")
        if not (suffix in TEXT or plain) or name.startswith("tests/fixtures/"):
            continue
        text = (root / name).read_bytes().decode("utf-8", errors="replace")
        if "\ufffd" in text:
            problems.append(f"{name}: not UTF-8")
        problems += check_text(name, text)
        if suffix in CODE:
            code.append(name)
            problems += check_code(name, text)
        needs_licence = suffix in CODE | {".py", ".sh", ".cmake"} or plain and suffix == ".txt"
        if needs_licence and "SPDX-License-Identifier: Apache-2.0" not in text[:200]:
            problems.append(f"{name}: no SPDX line at the top")
    problems += check_format(root, code)
    print("\n".join(problems) if problems else f"style: {len(code)} code files are fine")
    if not code:
        print("style: no files found")
    return 1 if problems or not code else 0


if __name__ == "__main__":
    sys.exit(main())

"""Damage a file or a command line. Each function takes a source of random numbers and the original."""

import json
import os
import random
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Damage = Callable[[random.Random, bytes], bytes | str]
"""A function that returns the new content, or the name of an object (such as a FIFO) for `put`."""


def flip(draw: random.Random, content: bytes) -> bytes:
    """Flip one or more bits."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 4, 30))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(draw: random.Random, content: bytes) -> bytes:
    """Cut off the end of a file."""
    return content[: draw.randrange(len(content))]


def splice(draw: random.Random, content: bytes) -> bytes:
    """Cut out some bytes in the middle."""
    begin = draw.randrange(len(content))
    return content[:begin] + content[begin + draw.randrange(1, 40) :]


def double(draw: random.Random, content: bytes) -> bytes:
    """Repeat a line."""
    lines = content.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    return b"".join([*lines[: at + 1], *lines[at:]])


def drop(draw: random.Random, content: bytes) -> bytes:
    """Delete a line of the file. From a TensorBoard log, delete a record instead."""
    parts = _records(content) or content.splitlines(keepends=True)
    del parts[draw.randrange(len(parts))]
    return b"".join(parts)


def _records(content: bytes) -> list[bytes]:
    """Return the records of a TensorBoard log. The result is empty for any other file."""
    records = []
    while len(content) > 12:
        length = 16 + struct.unpack("<Q", content[:8])[0]
        if length > len(content):
            return []
        records.append(content[:length])
        content = content[length:]
    return [] if content else records


def digit(draw: random.Random, content: bytes) -> bytes:
    """Replace a digit with another digit. The result is often a valid file."""
    places = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
    at = draw.choice(places)
    return content[:at] + str(draw.randrange(10)).encode() + content[at + 1 :]


def encode(draw: random.Random, content: bytes) -> bytes:
    """Change the encoding of the text, or insert bytes that are not text."""
    text = content.decode("latin-1")
    return draw.choice((
        lambda: text.encode("utf-16"),
        lambda: text.encode("utf-32"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content.replace(b"\n", b"\r\n"),
        lambda: content + b"\xff\xfe\x80",
        lambda: content.replace(b"a", b"\xe9", 3),
        lambda: content.replace(b" ", b"\0", 2),
    ))()  # fmt: skip


SPECIAL = ("fifo", "device", "directory", "dangling", "loop", "sparse", "unreadable socket")


def whole(draw: random.Random, content: bytes) -> bytes | str:
    """Replace the file with something different."""
    return draw.choice((
        b"", b"\n", b"{}", b"[]", b"null", b"0", b"{", b"[" * 100_000, b'{"a":' * 20_000, b"9" * 10_000,
        b"NaN", b"\0" * 1000, content * 2, *SPECIAL,
    ))  # fmt: skip


ODD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\ud800", "\x1b[31m", [], {}, [[]], -1, 0, 1e308, 5e-324, -1e308, 10**30),
    *(10**400, float("nan"), float("inf"), "NaN", "Infinity", "-Infinity", "1", 2**63, -(2**63), "9" * 5000),
)
PLAUSIBLE: tuple[Any, ...] = (
    *(0.5, 2.0, 1000.0, 0.001, "passed", "improved", "waived", "complete", True, False, None, 3, 7, "99%"),
    *("2999-12-31", "2026-12-31T00:00:00+00:00"),
)
"""Values that somebody could have written."""


def value(draw: random.Random, content: bytes) -> bytes:
    """Change, remove or rename a JSON value or a line `key = value`."""
    try:
        data = json.loads(content)
    except ValueError:
        return _setting(draw, content)
    holder, key = draw.choice(_places(data))
    how = draw.random()
    if how < 0.35:
        del holder[key]
    elif how < 0.45 and isinstance(holder, dict):
        holder[str(draw.choice(ODD))[:50]] = holder.pop(key)
    elif how < 0.5 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = draw.choice(draw.choice((ODD, PLAUSIBLE)))
    return _dumped(data)


JUDGED = ("tokens_per_s", "peak_memory_bytes", "loss", "recorded_at", "accepted")
"""Prefixes of the keys that decide verdicts. `everywhere` chooses one of them in half of the cases."""


def everywhere(draw: random.Random, content: bytes) -> bytes:
    """Change the values of all JSON keys with the same prefix, in every object, like search and replace."""
    try:
        data = json.loads(content)
    except ValueError:
        return _setting(draw, content)
    places = [(holder, key) for holder, key in _places(data) if isinstance(holder, dict)]
    _, chosen = draw.choice(places)
    by = draw.choice((0.3, 0.1, 3.0, None, *PLAUSIBLE))
    is_factor = isinstance(by, float) and draw.random() < 0.8
    judged_keys = [key for key in JUDGED if f'"{key}'.encode() in content]
    if judged_keys and draw.random() < 0.5:
        chosen = draw.choice(judged_keys)
    for holder, key in places:
        if not key.startswith(chosen) or key not in holder:
            continue
        old = holder[key]
        if is_factor and isinstance(old, int | float) and not isinstance(old, bool):
            holder[key] = old * by
        elif is_factor and isinstance(old, list) and all(isinstance(number, float) for number in old):
            holder[key] = [number * by for number in old]
        elif by is None:
            del holder[key]
        else:
            holder[key] = by
    return _dumped(data)


def _places(data: Any) -> list[tuple[Any, Any]]:
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(inner, dict | list):
                visit(inner)

    visit(data)
    return places


def _dumped(data: Any) -> bytes:
    sys.set_int_max_str_digits(0)
    return json.dumps(data, indent=1).encode()


def _setting(draw: random.Random, content: bytes) -> bytes:
    lines = content.decode("latin-1").splitlines()
    settings = [number for number, line in enumerate(lines) if "=" in line]
    if not settings:  # neither JSON nor settings
        return flip(draw, content)
    at = draw.choice(settings)
    odd = draw.choice((
        *("", '""', "nan", "-1", "1e999", "9" * 5000, "[]", "yes", "\x1b", "1979-05-27", "2999-12-31", '"*"'),
        *('"record"', "record", '"99%"', "0", "true", "false"),
    ))  # fmt: skip
    lines[at] = draw.choice((f"{lines[at].partition('=')[0]}= {odd}", "", f"x{lines[at]}", f" {lines[at]}"))
    return "\n".join([*lines, ""]).encode("latin-1")


DAMAGES: Sequence[tuple[int, Damage]] = (
    *((4, flip), (2, cut), (2, splice), (1, double), (1, drop), (2, digit)),
    *((2, encode), (2, whole), (5, value), (3, everywhere)),
)


def put(file: Path, damage: bytes | str) -> None:
    """Replace the file with its damaged version."""
    file.unlink()
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    elif damage == "fifo":
        os.mkfifo(file)
    elif damage == "device":
        file.symlink_to("/dev/zero")
    elif damage == "directory":
        file.mkdir()
    elif damage == "dangling":
        file.symlink_to("nowhere")
    elif damage == "loop":
        file.symlink_to(file.name)
    elif damage == "sparse":
        with file.open("wb") as made:
            made.truncate(10**12)
    else:
        os.mknod(file, 0o140600)  # a socket that no server listens to


NAMES = (
    *("report", "export", "judge", "night --plan", "history list", "history add", "history trend"),
    *("history failures", "baseline list", "baseline show", "baseline diff", "baseline accept", "init"),
    *("github comment", "github issue", "baseline refresh", "nothing", ""),
)
WORDS = (
    *(
        "",
        "-",
        "--",
        "--json",
        "/dev/zero",
        "/dev/null",
        "/proc/self/mem",
        ".",
        "..",
        "/",
        "\udc80",
        "\x1b[2J",
    ),
    *("a" * 5000, "--tolerance", "nan", "-1", "1e999", "99999999999999999999", "--history", "--store"),
    *("--cases", "--since", "0000-00-00", "9999-99-99", "*", "[", "%", "{}", "\u202e", "--help", "-k", "and"),
    *("--format", "hud", "openmetrics", "results/results.json", "traces.jsonl", "--out", "--baselines"),
    *(
        "fifo",
        "--hardware",
        "--baseline",
        "--tag",
        "HEAD",
        "no-such",
        "🙂",
        "'",
        '"',
        "$(id)",
        "\n",
        "--reason",
    ),
)


def invented_line(draw: random.Random) -> list[str]:
    """Return a damaged command line."""
    return [*draw.choice(NAMES).split(), *draw.choices(WORDS, k=draw.randrange(4))]


def damaged_line(draw: random.Random, words: Sequence[str]) -> list[str]:
    """Return a command line in which a word after the name is lost, repeated, inserted or misspelt."""
    changed = list(words)
    at = draw.randrange(1, len(changed))
    how = draw.randrange(5)
    if how == 0:
        del changed[at]
    elif how == 1:
        changed.insert(at, changed[at])
    elif how == 2:
        changed.insert(at, draw.choice(WORDS))
    elif how == 3:
        changed[at] = draw.choice(WORDS)
    else:
        word = changed[at]
        place = draw.randrange(max(1, len(word)))
        changed[at] = word[:place] + draw.choice(("", "x", "-", "\u00e9", "=")) + word[place + 1 :]
    return changed

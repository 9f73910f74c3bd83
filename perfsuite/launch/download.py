"""Plan the download of packages, and ask for consent. The user sees names, versions and sizes."""

import http.client
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from perfsuite.errors import PackageError
from perfsuite.launch.installer import Package

LARGE_BYTES = 10**9  # a download of at least this size needs consent
SMALL_BYTES = 10**7  # packages below this size are listed without their size
NAMES_SHOWN = 8  # maximum number of packages to list, largest first
HEAD_S = 10  # maximum number of seconds to wait until a server returns the size of a file
UNPACKED = 3
"""Estimated bytes on the disk for each byte of a wheel. They include the wheel itself, which stays in pip's
cache, and the unpacked files."""
MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest major version of NVIDIA's driver that supports each major version of CUDA."""
_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu(\d+))?")


Consent = Callable[[str, bool], bool]
"""A function that gets a description of the planned download, and whether the download is large. It returns
whether to proceed."""


def refuse_large(text: str, is_large: bool) -> bool:
    """Consent to small downloads only."""
    return not is_large


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The packages to install for an arm."""

    changes: tuple[Package, ...]
    notes: tuple[str, ...] = ()  # facts about the packages that the user should know

    @property
    def downloads(self) -> list[Package]:
        """The packages whose files are not yet on this machine."""
        return [package for package in self.changes if not package.is_here]

    @cached_property
    def sizes(self) -> Mapping[str, int | None]:
        """The size of each file in bytes, by address. None if the size is unknown."""
        urls = [package.url for package in self.downloads]
        with ThreadPoolExecutor(8) as threads:
            there = dict(zip(urls, threads.map(size_of, urls), strict=True))
        return {
            **there,
            **{package.url: _size_here(package.url) for package in self.changes if package.is_here},
        }

    @property
    def unpacked_bytes(self) -> int:
        """Estimated disk space for the packages, in bytes. Packages of unknown size are left out."""
        return UNPACKED * sum(filter(None, self.sizes.values()))

    @property
    def cuda(self) -> int | None:
        """The major version of CUDA for which the planned torch is built, or None."""
        for package in self.changes:
            runtime = _RUNTIME.fullmatch(package.name)
            if runtime is not None:
                return int(runtime[1] or package.version.partition(".")[0])
        return None


def ask_for(consent: Consent, plans: Sequence[Plan]) -> None:
    """Ask once for consent to all downloads of the plans. Raises `PackageError` if the user declines."""
    downloads = list({package.url: package for plan in plans for package in plan.downloads}.values())
    notes = list(dict.fromkeys(note for plan in plans for note in plan.notes))
    if not downloads:
        if notes:
            consent("; ".join(notes), False)
        return
    size_by_url = {url: size for plan in plans for url, size in plan.sizes.items()}
    sizes = [size_by_url[package.url] for package in downloads]
    total = sum(size for size in sizes if size is not None)
    unknown = sizes.count(None)
    by_size = sorted(zip(downloads, sizes, strict=True), key=lambda pair: -(pair[1] or 0))
    names = [
        f"{package.name} {package.version}".rstrip()
        + (f" ({amount(size)})" if size is not None and size >= SMALL_BYTES else "")
        for package, size in by_size
    ]
    left = len(names) - NAMES_SHOWN
    listed = ", ".join([*names[:NAMES_SHOWN], *([f"and {left} more"] if left > 0 else [])])
    size = amount(total) if unknown < len(sizes) else "packages of unknown size"
    more = f", plus packages of unknown size ({unknown})" if 0 < unknown < len(sizes) else ""
    text = "; ".join([f"pip downloads {size}{more}: {listed}", *notes])
    if not consent(text, total >= LARGE_BYTES):
        needs = "A download this large needs the option --yes of perfsuite compare, bisect or releases"
        raise PackageError(f"{text}. {needs}")


def check_space(plans: Sequence[Plan], store: Path) -> None:
    """Raise `PackageError` if the store's disk has too little space for the packages of the plans."""
    place = next(folder for folder in (store.absolute(), *store.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    needed = sum(plan.unpacked_bytes for plan in plans)
    if needed > free:
        raise PackageError(
            f"the packages need about {amount(needed)} on the disk, but {place} has only {amount(free)} "
            "free. Free some space, or name a directory on another disk with --store"
        )


def check_driver(plan: Plan | None, driver: str | None) -> None:
    """Raise `PackageError` if the NVIDIA driver is too old for the planned torch's version of CUDA.

    Nothing is raised if `driver` is None, which means that the machine has no driver.
    """
    major = re.match(r"\d+", driver or "")
    oldest = MIN_DRIVER.get(plan.cuda or 0) if plan is not None else None
    if plan is None or major is None or oldest is None or int(major[0]) >= oldest:
        return
    raise PackageError(
        f"this torch is built for CUDA {plan.cuda}, which needs NVIDIA driver {oldest} or later, but this "
        f"machine has {driver}. Update the driver, or use --dry, which compares only the work of a step"
    )


def size_of(url: str) -> int | None:
    """Return the size in bytes of a file on a server, or None if the server does not report it."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=HEAD_S) as answer:
            length = answer.headers.get("Content-Length")
            return int(length) if length is not None else None
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _size_here(url: str) -> int | None:
    try:
        return Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path)).stat().st_size
    except OSError:
        return None


def amount(size: int) -> str:
    """Format a number of bytes in GB or MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

"""Reads the pages of the documentation: blocks of code with their marks, links, and code in the text.

A mark is an HTML comment before a block. Neither GitHub nor the site shows it:

    <!-- needs: gpu --> a test cannot run the commands; `NEEDS` lists the reasons
    <!-- file: cases/test_a.py -->  the block is written to this file, relative to the root of the project
    <!-- exits: 1 -->               each command ends with this exit status (`0 or 3`: with one of these)
    <!-- shows: regressed -->       the last command prints this
    <!-- sample: table -->          the block is a report that `make samples` writes
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
NEEDS = {
    "gpu": "a machine with GPUs",
    "github": "a repository on GitHub",
    "root": "the rights of root",
    "minutes": "minutes of measuring, building or downloading",
    "slurm": "a Slurm cluster",
    "browser": "a browser, or a server that runs until it is stopped",
}
MARKS = frozenset({"needs", "file", "exits", "shows", "sample"})


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of code."""

    where: str
    """The page and the line of the block, for messages."""
    language: str
    text: str
    marks: dict[str, str]

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, one per line. A line that ends in a backslash continues."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """The path from the root of the repository."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """The file's content."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        """All fenced blocks, in the order of the page."""
        page_blocks = []
        marks = dict[str, str]()
        for token in self._tokens:
            if token.type == "fence":
                assert token.map is not None
                where = f"{self.name}:{token.map[0] + 1}"
                page_blocks.append(
                    Block(where=where, language=token.info.strip(), text=token.content, marks=marks)
                )
            is_comment = token.type == "html_block"
            marks = marks | dict(re.findall(r"<!-- (\w+): (.+?) -->", token.content)) if is_comment else {}
        return page_blocks

    @property
    def files(self) -> dict[str, str]:
        """The text of each block that is a file, by the file's path."""
        return {block.marks["file"]: block.text for block in self.blocks if "file" in block.marks}

    @cached_property
    def _inline(self) -> list[Token]:
        return [child for token in self._tokens for child in token.children or ()]

    @cached_property
    def code(self) -> list[str]:
        """All code between backquotes in the text."""
        return [token.content for token in self._inline if token.type == "code_inline"]

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and pictures, without those on the internet."""
        attributes = [token.attrs.get("href") or token.attrs.get("src") for token in self._inline]
        links = [str(link) for link in attributes if link is not None]
        return [link for link in links if not re.match(r"[a-z]+:", link)]

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors of the page's headings, with the names that GitHub and MyST give them."""
        after_open = zip(self._tokens, self._tokens[1:], strict=False)
        headings = [title.content for token, title in after_open if token.type == "heading_open"]
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    @cached_property
    def commands(self) -> list[str]:
        """All commands on the page: in shell blocks, and between backquotes in the text."""
        in_blocks = [
            command for block in self.blocks for command in block.commands if block.language == "shell"
        ]
        return in_blocks + self.code


def pages() -> list[Page]:
    """Return README, CONTRIBUTING, and every page of the site."""
    return [
        Page(ROOT / "README.md"),
        Page(ROOT / "CONTRIBUTING.md"),
        *map(Page, sorted((ROOT / "docs").rglob("*.md"))),
    ]

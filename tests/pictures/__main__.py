"""Make every picture of docs/images: `make pictures`. Without a browser, only the drawn pictures are made."""

from tests.browser import missing
from tests.pictures import detection, images


def main() -> None:
    """Draw what needs no browser, then take the pictures of pages."""
    detection.update()
    images.draw()
    reason = missing()
    if reason is not None:
        raise SystemExit(f"without the pictures of pages: {reason}")
    images.photograph()


if __name__ == "__main__":
    main()

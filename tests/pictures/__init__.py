"""The pictures of docs/images: each is made from today's code by `make pictures`, and a test compares."""

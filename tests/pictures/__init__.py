"""The pictures of docs/images. `make pictures` makes them with today's code, and a test compares them."""

"""The first day on a GPU: what only a GPU can show. `make gpu-day`."""

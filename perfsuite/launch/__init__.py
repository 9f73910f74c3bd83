"""Start launches, watch them from the driver's process, and end them."""

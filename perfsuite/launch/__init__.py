"""The driver's side of launches: start them, watch them from outside, and end them."""

"""The driver's side of launches: start them, watch them from here, end them."""

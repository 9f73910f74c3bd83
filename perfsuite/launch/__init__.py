"""Launches, on the driver's side: start them, watch them from outside, and end them."""

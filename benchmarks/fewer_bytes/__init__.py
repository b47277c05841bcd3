"""Ways to send fewer bytes than the default, tried before any of them is built."""

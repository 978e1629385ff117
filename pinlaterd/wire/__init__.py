"""The only ZeroMQ: what processes say to each other, and the ends they say it through."""

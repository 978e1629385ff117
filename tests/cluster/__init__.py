"""Several servers, each on a machine of its own, and what may befall those."""

"""Faults of the stores: servers, networks, disks, owners, clocks."""

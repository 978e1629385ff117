"""Faults of processes, machines and stores, injected for real."""

"""The front: takes Thrift calls, chooses shards, passes bytes through, merges where it must.

Holds no durable state; any number may run beside each other.
"""

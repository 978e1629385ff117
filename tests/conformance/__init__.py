"""The same tests for every engine: over the Thrift interface, and of the engines themselves."""

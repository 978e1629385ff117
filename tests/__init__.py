"""The tests. Folders whose fixtures share a deployment are packages: it ends with them."""

"""Storage: the contract (`base.py`), the search of bodies, and the engines that fulfil them."""

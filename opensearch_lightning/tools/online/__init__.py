"""Tools on services of the internet, or on servers of one's own that speak the same protocols."""

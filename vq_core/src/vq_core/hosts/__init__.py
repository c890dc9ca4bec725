"""Hosts: the libraries whose models vq serves.  Each package here alone knows its library."""

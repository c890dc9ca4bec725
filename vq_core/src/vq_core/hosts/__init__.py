"""Hosts: the libraries whose models vq serves.  Each package here alone knows its library;
:mod:`~vq_core.hosts.loading` knows a name in mlx-lm and imports nothing of it."""

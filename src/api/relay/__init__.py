"""The relay: a reverse proxy that shortens a prompt's old tool results when its cached prefix has expired."""

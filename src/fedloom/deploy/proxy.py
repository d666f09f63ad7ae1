# SPDX-License-Identifier: Apache-2.0
"""A reverse proxy before the link, which lets nodes through and nobody else.

Flower's link has one port for its nodes (the Fleet API) and for those who submit code (the Control API), which open-
source Flower does not authenticate. So the link listens on loopback only, and nodes reach it through this proxy.
"""

from __future__ import annotations

from pathlib import Path

from fedloom.runs.files import write_file

CONFIG = """\
# nginx -c {keys}/nginx.conf -p {keys}
error_log {keys}/nginx-error.log;
pid {keys}/nginx.pid;
events {{}}
http {{
  access_log off;
  client_body_temp_path {keys}/nginx-tmp;
  proxy_temp_path {keys}/nginx-tmp;
  fastcgi_temp_path {keys}/nginx-tmp;
  uwsgi_temp_path {keys}/nginx-tmp;
  scgi_temp_path {keys}/nginx-tmp;
  server {{
    listen {listen} ssl;
    ssl_certificate {keys}/server.pem;
    ssl_certificate_key {keys}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    # Flower sends large trees in pieces of 5 MiB
    client_max_body_size 16m;
    location /v1/fleet/ {{
      proxy_pass https://127.0.0.1:{link};
      proxy_ssl_verify on;
      proxy_ssl_trusted_certificate {keys}/ca.pem;
      proxy_ssl_name localhost;
      proxy_read_timeout 300s;
    }}
    location / {{
      return 403;
    }}
  }}
}}
"""


LISTEN, LINK = 9092, 8000
"""The proxy's port, for nodes; the link's, on loopback."""


def write_nginx_config(keys: Path, listen: int = LISTEN, link: int = LINK) -> Path:
    """Write the config of an nginx on port ``listen`` before a link on loopback's port ``link``, beside its keys."""
    file = keys / "nginx.conf"
    write_file(file, CONFIG.format(keys=keys.absolute(), listen=listen, link=link).encode())
    return file

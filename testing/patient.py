"""HTTP requests of tests to servers in other processes: httpx's limit of five seconds is too short for a busy machine.

`patient.get(url, timeout=2)` still takes a limit of its own, where a loop asks again.
"""

import ssl
from functools import partial

import httpx

LIMIT_S = 60.0
# A client reads the system's authorities, which takes longer than a request to a server of plain HTTP.
NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, timeout=LIMIT_S, verify=NO_AUTHORITIES)
post = partial(httpx.post, timeout=LIMIT_S, verify=NO_AUTHORITIES)
put = partial(httpx.put, timeout=LIMIT_S, verify=NO_AUTHORITIES)

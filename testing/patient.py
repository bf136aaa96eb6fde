"""HTTP requests of tests to servers in other processes: httpx's limit of five seconds is too short for a busy machine.

`patient.get(url, timeout=2)` still takes a limit of its own, where a loop asks again.
"""

from functools import partial

import httpx

LIMIT_S = 60.0

get = partial(httpx.get, timeout=LIMIT_S)
post = partial(httpx.post, timeout=LIMIT_S)
put = partial(httpx.put, timeout=LIMIT_S)

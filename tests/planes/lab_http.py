"""One HTTP request from wherever this runs: LIMIT_S UNTIL URL [BODY]. Prints the status, or 0, then the body or the error's name.

With UNTIL it is asked again until the body has that text, or the time is over.
"""

import http.client
import sys
import time
from urllib.parse import urlsplit


def ask(url: str, body: str | None, limit_s: float) -> tuple[int, str]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=limit_s)
    try:
        connection.request("GET" if body is None else "POST", where.path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, type(error).__name__
    finally:
        connection.close()


def main(limit: str, until: str, url: str, body: str | None = None) -> None:
    end = time.monotonic() + float(limit)
    while True:
        status, text = ask(url, body, float(limit))
        if until in text or time.monotonic() > end:
            print(status)
            print(text, end="")
            return
        time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])

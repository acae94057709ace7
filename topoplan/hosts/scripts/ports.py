"""Listens on ports and connects to those of other machines.

Runs on a host, on Python 3.6 or later, and ends when its standard input does, or after a while. Prints one line of JSON
when it listens and one when it has connected.
"""

import asyncio
import contextlib
import json
import os
import sys

task = json.loads(sys.argv[1])
token = task["token"].encode()
LATE = asyncio.TimeoutError  # not the same class as TimeoutError before Python 3.11


def why(error: OSError) -> str:
    """Return `connection refused`, or the text of a failed name lookup."""
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else (error.strerror or str(error))


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send our token, and let the other side close: the side that closes first keeps the port for a minute."""
    with contextlib.suppress(LATE, OSError):
        writer.write(token + b"\n")
        await asyncio.wait_for(reader.read(), task["connect_s"])
    writer.close()


async def listen(port: int) -> str:
    """Listen on a port; return an empty string, or why that failed."""
    try:
        await asyncio.start_server(greet, "0.0.0.0", port)
    except OSError as error:
        return why(error)
    with contextlib.suppress(OSError):  # a machine without IPv6
        await asyncio.start_server(greet, "::", port)
    return ""


async def connect(turn: asyncio.Semaphore, address: str, port: int, theirs: str) -> str:
    """Connect to the machine with a token; return an empty string, or why that failed."""
    async with turn:
        writer = None
        try:
            connected = asyncio.open_connection(address, port)
            reader, writer = await asyncio.wait_for(connected, task["connect_s"])
            said = await asyncio.wait_for(reader.readline(), task["connect_s"])
            return "" if said == theirs.encode() + b"\n" else "another program answers"
        except LATE:
            return "timed out"
        except OSError as error:
            return why(error)
        finally:
            if writer is not None:
                writer.close()


def say(**what: object) -> None:
    """Print one line of output."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def work() -> None:
    """Listen, report the ports, connect to the peers named on standard input, report the results, and wait for its
    end."""
    free = []  # type: list[int]
    for port in task["candidates"]:
        if len(free) < task["ports"] and not await listen(port):
            free.append(port)
    say(ports=free, master=None if task["master"] is None else await listen(task["master"]))
    stdin = asyncio.StreamReader(limit=2**26)
    await asyncio.get_event_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    line = await stdin.readline()
    if line:
        turn = asyncio.Semaphore(task["at_once"])
        say(results=await asyncio.gather(*(connect(turn, *peer) for peer in json.loads(line.decode()))))
        await stdin.read()


async def main() -> None:
    """Do all of the work within the time limit."""
    with contextlib.suppress(LATE):
        await asyncio.wait_for(work(), task["limit_s"])


with contextlib.suppress(Exception):
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
asyncio.new_event_loop().run_until_complete(main())
os._exit(0)  # a name lookup may still be waiting for its server

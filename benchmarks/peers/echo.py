"""The stateless tool server that calls pass through to, on `megamcp.sdk`: a tool that does nothing but answer.

megamcp tool-server benchmarks.peers.echo:server --port 9000
"""

from megamcp.sdk import Server

server = Server("echo", instructions="A tool that does nothing but answer.")


@server.tool(read_only=True)
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"{city}: light rain, 11 degrees, wind from the west at 14 km/h."

"""An MCP server with two tools, over its standard streams."""

from datetime import date

from mcp.server.mcpserver import MCPServer

server = MCPServer("calendar", log_level="ERROR")


@server.tool()
def days_between(start: date, end: date) -> int:
    """Days from one date to another, both as YYYY-MM-DD."""
    return (end - start).days


@server.tool()
def weekday(day: date) -> str:
    """Day of the week of a date, given as YYYY-MM-DD."""
    return f"{day:%A}"


if __name__ == "__main__":
    server.run()

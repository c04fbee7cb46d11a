"""A tool server over stdio that does what no tool server should: `hostile_server.py [OPTION]`.

Written without an SDK, since no SDK would do these things. Each tool is one misdeed; options are misdeeds at the start:
`--mute` never answers, `--die` ends at once, `--refuse` refuses the handshake, `--modern` speaks 2026-07-28 only,
`--noisy` prints before it answers, `--daemon` leaves its work to a child, `--stubborn` outlives its stdin and SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

OPTIONS = sys.argv[1:]
MODERN = "--modern" in OPTIONS
names = [
    *("echo", "pid", "environ", "sleep", "garbage", "die", "ignore", "loud", "huge", "huge_last", "orphan", "odd"),
    *("progress", "ask", "change", "deaf", "shut", "null", "batch", "newlines", "endless"),
]
answers = []
cancelled = threading.Event()
lock = threading.Lock()


def write(text):
    with lock:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def send(message):
    write(json.dumps({"jsonrpc": "2.0", **message}))


def result(number, text):
    send({"id": number, "result": {"content": [{"type": "text", "text": text}]}})


def tool(number, name, arguments, params):
    match name:
        case "echo":
            result(number, str(arguments.get("value")))
        case "pid":
            result(number, str(os.getpid()))
        case "environ":
            result(number, json.dumps(dict(os.environ)))
        case "sleep":
            cancelled.wait(arguments["seconds"])
            result(number, "slept")
        case "garbage":
            for line in (
                "Hello!",
                "[INFO] ready",
                "{}",
                "[]",
                "7",
                '{"level":"info"}',
                "\xff\xfe",
                '{"id":99,"result":{}}',
            ):
                write(line)
            result(number, "clean")
        case "die":
            sys.stderr.write("I die of " + arguments.get("cause", "nothing") + "\n")
            sys.stderr.flush()
            os._exit(3)
        case "ignore":
            while True:
                time.sleep(1)
                with open(arguments["path"], "a") as file:
                    file.write(".")
        case "loud":
            line = "x" * 200 + "\n"
            until = time.monotonic() + arguments["seconds"]
            threading.Thread(target=lambda: result(number, "said"), daemon=True).start()
            while time.monotonic() < until:
                sys.stderr.write(line * 500)
                if arguments.get("stdout"):
                    write(line)
        case "huge":
            result(number, "x" * arguments["bytes"])
        case "huge_last":
            with lock:
                sys.stdout.write('{"result":{"content":[{"type":"text","text":"' + "x" * arguments["bytes"])
                sys.stdout.write(f'"}}]}},"jsonrpc":"2.0","id":{number}}}\n')
                sys.stdout.flush()
        case "orphan":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            os._exit(0)
        case "odd":
            send({"id": number, "result": 5})
        case "progress":
            token = params["_meta"]["progressToken"]
            for step in range(arguments["steps"]):
                send({"method": "notifications/progress", "params": {"progressToken": token, "progress": step}})
                send({"method": "notifications/progress", "params": {"progressToken": "foreign", "progress": step}})
            result(number, "done")
        case "ask":
            answers.clear()
            for method in ("ping", "sampling/createMessage", "elicitation/create", "roots/list"):
                send({"id": method, "method": method, "params": {}})
            while len(answers) < 4:
                time.sleep(0.01)
            result(number, json.dumps(answers))
        case "change":
            names.append(arguments["name"])
            send({"method": "notifications/tools/list_changed"})
            result(number, "changed")
        case "deaf":
            result(number, "what?")
            time.sleep(600)
        case "shut":
            os.close(1)
            time.sleep(600)
        case "endless":
            while True:
                sys.stdout.write("x" * 100_000)
        case "null":
            write('{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"I can\'t read that"}}')
        case "batch":
            write(json.dumps([{"jsonrpc": "2.0", "id": number, "result": {"content": []}}]))
        case _:
            result(number, json.dumps(arguments))


def answer(message):
    number, method, params = message.get("id"), message.get("method"), message.get("params", {})
    if method is None:
        answers.append([number, "result" in message, message.get("error", {}).get("code")])
    elif method == "notifications/cancelled":
        cancelled.set()
    elif number is None or "--mute" in OPTIONS:
        pass
    elif method == "initialize" and not MODERN and "--refuse" not in OPTIONS:
        capabilities = {"tools": {"listChanged": True}}
        known = {
            "protocolVersion": "2024-11-05",
            "capabilities": capabilities,
            "serverInfo": {"name": "h", "version": "1"},
        }
        send({"id": number, "result": {**known, "instructions": "Beware."}})
    elif method == "server/discover" and MODERN:
        known = {
            "resultType": "complete",
            "supportedVersions": ["2026-07-28"],
            "capabilities": {"tools": {}, "resources": {"subscribe": True}},
            "instructions": "New.",
        }
        send({"id": number, "result": known})
    elif MODERN and "io.modelcontextprotocol/protocolVersion" not in params.get("_meta", {}):
        send({"id": number, "error": {"code": -32022, "message": "Unsupported protocol version"}})
    elif method == "subscriptions/listen":
        pass  # it goes on until it is cancelled, and what was cancelled needs no answer
    elif method == "tools/list":
        send({"id": number, "result": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}})
    elif method == "tools/call" and params["name"] == "deaf":
        tool(number, params["name"], params["arguments"], params)
    elif method == "tools/call":
        arguments = (number, params["name"], params["arguments"], params)
        threading.Thread(target=tool, args=arguments, daemon=True).start()
    else:
        send({"id": number, "error": {"code": -32601, "message": "No."}})


def main():
    if "--die" in OPTIONS:
        sys.exit("I die at once; my password is hunter2")
    if "--daemon" in OPTIONS:
        os.write(2, b"to work, child\n")
        if os.fork():
            os._exit(0)
    if "--noisy" in OPTIONS:
        write("Welcome to the hostile server!\n\n")
    if "--stubborn" in OPTIONS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin:
        answer(json.loads(line))
    if "--stubborn" in OPTIONS:
        time.sleep(600)


if __name__ == "__main__":
    main()

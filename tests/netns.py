#!/usr/bin/env python3
"""Training on two machines, and faults of the network between them. Each machine is a network namespace with a host
name of its own; a program between the two delays, drops and resets what they send. Needs root and `ip netns`; prints
a message and ends well elsewhere. For a build with `mpi` and `cuda`:

    cargo build --workspace --features mpi,cuda --bin fsdp --example bert_finetune
    tests/netns.py all                  every case
    tests/netns.py some                 a case of each kind, in 90 s
    tests/netns.py random COUNT [SEED]  faults, moments and engines at random
    tests/netns.py CASE..               cases by name; `tests/netns.py list` lists them

| variable | value |
|---|---|
| `FSDP`, `EXAMPLE` | paths of the programs `fsdp` and `bert_finetune` |
| `STORE` | path of the unit tests of `fsdp-runtime`, built with `cuda`. Without it, cases of the store are skipped |
"""

import fcntl
import heapq
import json
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

ADDRESSES = ["10.97.0.1", "10.97.0.2"]
NETWORK = "10.97.0.0/24"
# Where ranks of the store meet, and where those of MPI listen.
STORE_PORT, RANK_PORTS = 29500, (12000, 12099)
# Seconds for which ranks wait for each other where a case is about that.
TIMEOUT = 4
# Seconds beyond the time-out after which a run counts as hanging.
SLACK = 15
# Seconds beyond the time-out and `SLACK` that a run may take if all its frames are late, which makes it slow.
LATE = 60
PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SOL_PACKET, ETH_P_ALL = 15, 23, 263, 3
# An error that names a rank, or a machine as Open MPI does; or that the launcher itself or its `mpirun` was killed.
NAMED = r"rank \d|remote daemon|on node \S+|Remote host: +\S+|cannot be reached at|the host|`mpirun` failed: killed"
# A program that ends once the address refuses a connection to a port where nobody listens.
REACHES = """
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], 1), 1)
    except ConnectionRefusedError:
        sys.exit()
    except OSError:
        time.sleep(0.05)
"""


class Failed(Exception):
    """A case that did not end as stated."""


# The program between the two machines.


class Wire:
    """Forwards frames between two interfaces, as commands on standard input say:

    delay SECONDS     frames arrive so much later
    drop, pass        all frames are lost, without a sign; frames pass again
    reset LOW HIGH    resets the TCP connections at these ports, as a router would
    others LOW HIGH   resets the other ones
    """

    def __init__(self, names):
        self.ends = [self.open(name) for name in names]
        self.delay, self.drops = 0.0, False
        self.waiting, self.count = [], 0
        # Of each direction of a connection: the end it goes to, its first header, and its next numbers.
        self.connections = {}

    @staticmethod
    def open(name):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        # Frames keep the kernel's notes on checksums and segments that are still to be made.
        end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        end.bind((name, ETH_P_ALL))
        end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        return end

    def run(self):
        print("ready", flush=True)
        while True:
            until = self.waiting[0][0] - time.monotonic() if self.waiting else None
            ready, _, _ = select.select([*self.ends, sys.stdin], [], [], until and max(0, until))
            if sys.stdin in ready and not self.command(sys.stdin.readline().split()):
                return
            for at, end in enumerate(self.ends):
                if end in ready:
                    self.receive(end, self.ends[1 - at])
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(self.waiting)
                self.send(to, frame)

    def command(self, words):
        match words:
            case ["delay", seconds]:
                self.delay = float(seconds)
            case ["drop"]:
                self.drops = True
            case ["pass"]:
                self.drops = False
            case ["reset" | "others" as which, low, high]:
                self.reset(range(int(low), int(high) + 1), which == "others")
            case _:
                return False
        print("done", flush=True)
        return True

    def receive(self, end, to):
        try:
            frame = end.recv(1 << 17)
        except OSError:
            # The interface was taken down.
            return
        if self.drops:
            return
        self.note(frame, to)
        self.enqueue(to, frame)

    def enqueue(self, to, frame):
        self.count += 1
        heapq.heappush(self.waiting, (time.monotonic() + self.delay, self.count, to, frame))

    @staticmethod
    def send(to, frame):
        try:
            to.send(frame)
        except OSError:
            # The interface is down, or its queue is full: a frame is lost, as on a real wire.
            pass

    def note(self, frame, to):
        """Notes where a connection is after the frame."""
        header, ip = frame[10:24], frame[24:]
        if header[12:] != b"\x08\x00" or ip[9] != socket.IPPROTO_TCP:
            return
        length, words = struct.unpack("!H", ip[2:4])[0], (ip[0] & 15) * 4
        tcp = ip[words:]
        ports = struct.unpack("!HH", tcp[:4])
        sequence, _, offset, flags = struct.unpack("!IIBB", tcp[4:14])
        finished, opening, reset = flags & 1, flags >> 1 & 1, flags >> 2 & 1
        payload = length - words - (offset >> 4) * 4
        direction = (ip[12:16], ip[16:20], *ports)
        if finished or reset:
            self.connections.pop(direction, None)
        else:
            self.connections[direction] = (to, header, (sequence + payload + opening) % (1 << 32))

    def reset(self, ports, others):
        for direction, (to, header, sequence) in list(self.connections.items()):
            if (direction[2] in ports or direction[3] in ports) != others:
                self.enqueue(to, self.segment(header, direction[:2], direction[2:], sequence))
                del self.connections[direction]

    @staticmethod
    def segment(header, addresses, ports, sequence):
        """A frame that resets a connection."""

        def checksum(data):
            total = sum(struct.unpack(f"!{len(data) // 2}H", data))
            while total >> 16:
                total = (total & 0xFFFF) + (total >> 16)
            return ~total & 0xFFFF

        def tcp(check):
            return struct.pack("!HHIIBBHHH", *ports, sequence, 0, 5 << 4, 4, 0, check, 0)

        def ip(check):
            fields = (0x45, 0, 40, 0, 0, 64, socket.IPPROTO_TCP, check)
            return struct.pack("!BBHHHBBH", *fields) + addresses[0] + addresses[1]

        pseudo = addresses[0] + addresses[1] + struct.pack("!BBH", 0, socket.IPPROTO_TCP, 20)
        return bytes(10) + header + ip(checksum(ip(0))) + tcp(checksum(pseudo + tcp(0)))


# The machines.


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Network:
    """Two machines with a wire between them."""

    def __init__(self):
        self.spaces = [f"fsdp-{os.getpid()}-{at}" for at in range(2)]
        self.between = f"fsdp-{os.getpid()}-w"
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="fsdp-netns-"))
        self.wire = None

    def __enter__(self):
        try:
            for space in [*self.spaces, self.between]:
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            for at, space in enumerate(self.spaces):
                ip("link", "add", "net", "netns", space, "type", "veth", "peer", f"to{at}", "netns", self.between)
                ip("-n", space, "addr", "add", f"{ADDRESSES[at]}/24", "dev", "net")
                ip("-n", space, "link", "set", "net", "up")
                ip("-n", self.between, "link", "set", f"to{at}", "up")
            self.start_wire()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_wire(self):
        command = ["ip", "netns", "exec", self.between, sys.executable, "-B", __file__, "wire", "to0", "to1"]
        self.wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.wire.stdout.readline() == "ready\n", "the wire does not start"

    def __exit__(self, *_):
        self.end_all()
        if self.wire:
            self.wire.stdin.close()
            self.wire.wait(5)
        for space in [*self.spaces, self.between]:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def tell(self, command):
        """Changes what the wire does."""
        self.wire.stdin.write(f"{command}\n")
        self.wire.stdin.flush()
        assert self.wire.stdout.readline() == "done\n", command

    def link(self, state):
        """Takes the link down or up, at its end beyond machine 1: the machine loses the carrier."""
        ip("-n", self.between, "link", "set", "to1", state)

    def restore(self):
        """A network without faults, over which the machines reach each other."""
        self.link("up")
        for command in ["delay 0", "pass"]:
            self.tell(command)
        # For a moment after the link has come up there is no route.
        command = ["ip", "netns", "exec", self.spaces[1], sys.executable, "-c", REACHES, ADDRESSES[0]]
        subprocess.run(command, check=True, timeout=30)

    def inside(self, machine, prelude, command):
        """The command on a machine, whose shell runs `prelude` before."""
        shell = f'hostname node{machine}; {prelude or ":"}; exec "$@"'
        return ["ip", "netns", "exec", self.spaces[machine], "unshare", "--uts", "sh", "-c", shell, "sh", *command]

    def agent(self, prelude):
        """The program that `mpirun` starts its daemon on machine 1 with, in place of `ssh`."""
        file = self.folder / f"agent-{time.monotonic_ns()}"
        file.write_text(
            "#!/bin/sh\nshift\n"
            f"exec ip netns exec {self.spaces[1]} unshare --uts sh -c "
            f"'hostname node1; {prelude or ':'}; exec sh -c \"$1\"' sh \"$*\"\n"
        )
        file.chmod(0o755)
        return str(file)

    def processes(self):
        """The processes on both machines, with their commands."""
        found = {}
        for space in self.spaces:
            for pid in ip("netns", "pids", space).split():
                try:
                    words = pathlib.Path("/proc", pid, "cmdline").read_text().split("\0")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                # A process that has ended, and is not waited for yet, has no command.
                if words[0]:
                    found[int(pid)] = " ".join(words[:4])
        return found

    def left(self, seconds=6):
        """The processes that are left on the machines so many seconds later."""
        until = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def end_all(self):
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class Run:
    """A command that runs on a machine."""

    def __init__(self, network, machine, command, environment=None, prelude=""):
        self.log = network.folder / f"log-{time.monotonic_ns()}"
        # A short message is written at once.
        environment = {**os.environ, "RUST_BACKTRACE": "0", **(environment or {})}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                network.inside(machine, prelude, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, start_new_session=True,
            )

    def text(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, text, seconds=30):
        """Waits until the output has a text."""
        until = time.monotonic() + seconds
        while text not in self.text():
            if self.process.poll() is not None or time.monotonic() > until:
                raise Failed(f"no `{text}` in the output:\n{self.text()}")
            time.sleep(0.02)

    def end(self, within):
        """The exit code, at most so many seconds later."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise Failed(f"it hangs: no end within {within} s\n{self.text()}") from None

    def losses(self):
        """The losses that the run has printed at its end."""
        for line in reversed(self.text().splitlines()):
            if found := re.search(r'(\{".*\})$', line):
                return json.loads(found[1])["losses"]
            if found := re.search(r"losses (.*)$", line):
                return found[1]
        raise Failed(f"no losses in the output:\n{self.text()}")

    def goes_on(self, expected, within):
        """Checks that the run ends well, with these losses."""
        code = self.end(within)
        if code != 0:
            raise Failed(f"exit code {code}\n{self.text()}")
        if (losses := self.losses()) != expected:
            raise Failed(f"other losses than on one machine: {losses}, {expected}")

    def fails(self, within, *patterns):
        """Checks that the run ends with an error that has these patterns."""
        code = self.end(within)
        text = self.text()
        if code == 0:
            raise Failed(f"it ends well\n{text}")
        for pattern in patterns:
            if not re.search(pattern, text):
                raise Failed(f"no `{pattern}` in the output:\n{text}")


# The two engines.


def program(name):
    path = os.environ.get(name)
    if not path or not os.access(path, os.X_OK):
        sys.exit(f"{name} is `{path}`, not the path of a program\n{__doc__}")
    return os.path.abspath(path)


class Mpi:
    """Ranks that `fsdp launch --mpi` starts from machine 0, each training `bert_finetune`."""

    kind = "mpi"
    reference = {}

    def __init__(self, network, ranks=2, steps=20, timeout=60, batch=2):
        self.network, self.ranks, self.steps, self.timeout, self.batch = network, ranks, steps, timeout, batch
        self.example = program("EXAMPLE")
        # The output of each rank, on its machine.
        self.logs = network.folder / f"logs-{time.monotonic_ns()}"

    def flags(self):
        return [
            "--device", "flex", "--json", "--batch-size", str(self.batch), "--max-length", "32",
            "--steps", str(self.steps), "--timeout", str(self.timeout),
        ]  # fmt: skip

    def start(self, prelude="", other="", machine=0, flags=()):
        """Starts the ranks. A shell on machine 1 runs `prelude` before. `other` is the end of the command of the ranks
        there, and `flags` that of all."""
        hosts = self.network.folder / "hosts"
        hosts.write_text("".join(f"{address} slots={self.ranks // 2}\n" for address in ADDRESSES))
        script = f'[ "$(hostname)" = node0 ] || exec "$@" {other}; exec "$@"'
        command = [
            program("FSDP"), "launch", "--mpi", "-n", str(self.ranks), "--num-machines", "2",
            "--machine-rank", str(machine), "--mpirun-hostfile", str(hosts), "--num-cpu-threads-per-process", "1",
            "--grace", "1", "--log-dir", str(self.logs), "sh", "-c", script, "sh", self.example, *self.flags(), *flags,
        ]  # fmt: skip
        environment = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_plm_rsh_agent": self.network.agent(prelude),
            "OMPI_MCA_btl_tcp_if_include": NETWORK, "OMPI_MCA_oob_tcp_if_include": NETWORK,
            # A daemon that is cut off is found after 17 s, and one that is cut off for 8 s goes on.
            "OMPI_MCA_oob_tcp_keepalive_time": "5", "OMPI_MCA_oob_tcp_keepalive_intvl": "2",
            "OMPI_MCA_oob_tcp_keepalive_probes": "6",
            "OMPI_MCA_btl_tcp_port_min_v4": str(RANK_PORTS[0]), "OMPI_MCA_btl_tcp_port_range_v4": "100",
        }  # fmt: skip
        return [Run(self.network, machine, command, environment)]

    def expected(self):
        """The losses of threads on one machine."""
        key = (self.ranks, self.steps, self.batch)
        if key not in self.reference:
            command = [self.example, *self.flags(), "--quiet", "--engine", "local", "--world-size", str(self.ranks)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            self.reference[key] = json.loads(done.stdout.splitlines()[-1])["losses"]
        return self.reference[key]

    @staticmethod
    def under_way(runs):
        runs[0].wait_for("step 20/")


class Store:
    """Ranks that `fsdp launch` starts on each machine, as with GPUs: they meet at rank 0 and exchange gradients."""

    kind = "store"
    reference = {}

    def __init__(self, network, ranks=2, steps=200, timeout=60, pause=0):
        self.network, self.ranks, self.steps, self.timeout, self.pause = network, ranks, steps, timeout, pause
        self.program = program("STORE")

    def start_on(self, machine, prelude="", secret="a secret", program=None, ranks=None, machines=2, port=STORE_PORT):
        command = [
            globals()["program"]("FSDP"), "launch", "-n", str(ranks or self.ranks), "--num-machines", str(machines),
            "--machine-rank", str(machine), "--main-process-ip", ADDRESSES[0], "--main-process-port", str(port),
            program or self.program, "--exact", "launch::gpus::tests::rank_on_a_machine", "--ignored", "--nocapture",
        ]  # fmt: skip
        environment = {
            "STEPS": str(self.steps), "TIMEOUT_MS": str(1000 * self.timeout), "PAUSE_MS": str(self.pause),
            "FSDP_RUN_SECRET": secret,
        }  # fmt: skip
        return Run(self.network, machine, command, environment, prelude)

    def start(self, prelude=""):
        return [self.start_on(0), self.start_on(1, prelude)]

    def expected(self):
        """The losses of ranks on one machine."""
        key = (self.ranks, self.steps)
        if key not in self.reference:
            # The ranks that the losses are compared with may run already, and hold their port.
            run = Store(self.network, self.ranks, self.steps).start_on(0, machines=1, port=STORE_PORT + 1)
            if run.end(60) != 0:
                raise Failed(f"on one machine:\n{run.text()}")
            self.reference[key] = run.losses()
        return self.reference[key]

    @staticmethod
    def under_way(runs):
        runs[0].wait_for("step 100 of")


def all_go_on(engine, runs, within=60):
    """Checks that all of a launch's commands end well, with the losses of one machine."""
    expected = engine.expected()
    runs[0].goes_on(expected, within)
    for run in runs[1:]:
        if (code := run.end(10)) != 0:
            raise Failed(f"exit code {code}\n{run.text()}")


def other_version(network, path):
    """A program that says that it was built with another version of this crate."""
    bytes = pathlib.Path(path).read_bytes()
    other = network.folder / "another"
    other.write_bytes(re.sub(rb"fsdp-runtime \d+\.(?=\d)", b"fsdp-runtime 9.", bytes))
    other.chmod(0o755)
    return str(other)


# The cases.

CASES = {}


def case(some=False):
    """Registers a case: a function of a network that returns how it ended. `some` says that it is one of `some`."""

    def register(function):
        CASES[function.__name__.replace("_", "-")] = (function, some)
        return function

    return register


@case(some=True)
def mpi_plain(network):
    engine = Mpi(network, ranks=4)
    all_go_on(engine, engine.start())
    return "the losses of one machine, bit for bit"


@case()
def mpi_delay(network):
    network.tell("delay 0.02")
    # A step and the evaluation exchange hundreds of messages.
    engine = Mpi(network, steps=2, batch=64)
    all_go_on(engine, engine.start())
    return "20 ms each way: goes on"


# A rank of the other machine did not answer, or what MPI says of it.
LOST = r"rank [01] of 2 on node[01]: .*(rank [01] did not join|failed on rank|rank [01] failed)"


@case()
def mpi_reset(network):
    engine = Mpi(network, steps=100000, timeout=TIMEOUT)
    runs = engine.start()
    engine.under_way(runs)
    network.tell("reset {} {}".format(*RANK_PORTS))
    runs[0].fails(TIMEOUT + SLACK, LOST)
    return "an error that names the rank"


@case()
def mpi_reset_of_a_daemon(network):
    engine = Mpi(network, steps=100000, timeout=TIMEOUT)
    runs = engine.start()
    engine.under_way(runs)
    network.tell("others {} {}".format(*RANK_PORTS))
    runs[0].fails(TIMEOUT + SLACK, r"lost communication with a remote daemon")
    return "an error of `mpirun` that names the machine"


@case()
def mpi_link_down_5_s(network):
    engine = Mpi(network, steps=60, timeout=30)
    runs = engine.start()
    engine.under_way(runs)
    network.link("down")
    time.sleep(5)
    network.link("up")
    all_go_on(engine, runs)
    return "goes on"


@case(some=True)
def mpi_link_down(network):
    engine = Mpi(network, steps=100000, timeout=TIMEOUT)
    runs = engine.start()
    engine.under_way(runs)
    network.link("down")
    runs[0].fails(TIMEOUT + SLACK, r"\[rank 0\] Error: rank 1 of 2 on node1: .* rank 1 did not join within 4s")
    # Machine 1 is cut off from the launcher, so that its rank's error is in the log file there alone.
    text = (engine.logs / "rank-1.log").read_text()
    if not re.search(r"Error: rank 0 of 2 on node0: .* rank 0 did not join within 4s", text):
        raise Failed(f"no error on machine 1:\n{text}")
    return "an error on both, after the time-out"


@case()
def mpi_link_down_at_the_start(network):
    """The link goes down at several moments before ranks meet."""
    for moment in [0.3, 0.6, 0.9, 1.2]:
        network.restore()
        runs = Mpi(network, steps=100000, timeout=TIMEOUT).start()
        time.sleep(moment)
        network.link("down")
        runs[0].fails(2 * TIMEOUT + SLACK, NAMED)
        network.end_all()
    return "an error that names a rank or a machine"


# A machine whose clock is three hours ahead, and goes on from there.
CLOCK = "export LD_PRELOAD={} FAKETIME=+3h FAKETIME_DONT_FAKE_MONOTONIC=1"


def clock():
    """A prelude that puts a machine's clock forward."""
    for file in pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"):
        return CLOCK.format(file)
    return None


@case()
def mpi_clock(network):
    if not (ahead := clock()):
        return "skipped: there is no libfaketime"
    engine = Mpi(network)
    all_go_on(engine, engine.start(ahead))
    return "3 h ahead: goes on"


@case()
def mpi_late(network):
    engine = Mpi(network, steps=5)
    all_go_on(engine, engine.start("sleep 30"), 90)
    return "30 s late: goes on"


@case()
def mpi_twice(network):
    engine = Mpi(network)
    first, second = engine.start(), engine.start()
    all_go_on(engine, first)
    all_go_on(engine, second)
    return "two runs that do not meet: both go on"


@case()
def mpi_on_both_machines(network):
    run = Mpi(network).start(machine=1)[0]
    run.fails(10, r"`mpirun` starts the ranks of all machines; run this command on machine 0")
    return "refused on machine 1"


@case(some=True)
def mpi_seed(network):
    run = Mpi(network, timeout=TIMEOUT).start(other="--seed 1")[0]
    run.fails(30, r"rank 0 has `option seed: Some\(0\)`, rank 1 has `option seed: Some\(1\)`")
    return "an error on both"


@case()
def mpi_config(network):
    run = Mpi(network, timeout=TIMEOUT).start(other="--strategy SHARD_GRAD_OP")[0]
    run.fails(30, r"rank 0 has `option strategy: FullShard`, rank 1 has `option strategy: ShardGradOp`")
    return "an error on both"


@case()
def mpi_version(network):
    # A program of another version of this crate, at the same path.
    engine = Mpi(network, timeout=TIMEOUT)
    other = other_version(network, engine.example)
    run = engine.start(f"mount --bind {other} {engine.example}")[0]
    run.fails(30, r"rank 0 has `fsdp-runtime .*`, rank 1 has `fsdp-runtime 9\.")
    return "an error on both"


def saving(network, mount):
    """Starts a run that saves to a folder of machine 0, which `mount` replaces on machine 1."""
    folder, disk = network.folder / "checkpoints", network.folder / "disk"
    for path in (folder, disk):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    engine = Mpi(network, timeout=TIMEOUT, steps=100)
    return engine.start(mount(folder, disk), flags=["--save-dir", str(folder), "--save-every", "10"])[0]


@case(some=True)
def mpi_full_disk(network):
    def mount(folder, disk):
        # Machine 1 sees what machine 0 has made, and writes to a disk of its own.
        overlay = f"lowerdir={folder},upperdir={disk}/upper,workdir={disk}/work"
        return (
            f"mount -t tmpfs -o size=400k disk {disk} && mkdir {disk}/upper {disk}/work && "
            f"mount -t overlay -o {overlay} checkpoints {folder}"
        )

    full = r"cannot write \S*rank-00001\S*: No space left on device"
    on_0, on_1 = r"\[rank 0\] Error: rank 1 of 2 on node1: ", r"\[rank 1\] Error: rank 1 of 2 on node1: "
    saving(network, mount).fails(30, on_0, on_1, r"\[rank 0\] .*" + full, r"\[rank 1\] .*" + full)
    return "an error on both, which names the rank, its machine and the file"


@case()
def mpi_separate_disks(network):
    run = saving(network, lambda folder, _: f"mount -t tmpfs disk {folder}")
    missing = r"cannot create \S*rank-00001\S*: No such file"
    on_0, on_1 = r"\[rank 0\] Error: rank 1 of 2 on node1: ", r"\[rank 1\] Error: rank 1 of 2 on node1: "
    run.fails(30, on_0, on_1, r"\[rank 0\] .*" + missing, r"\[rank 1\] .*" + missing)
    return "an error on both: a checkpoint needs a disk that all machines share"


@case(some=True)
def store_plain(network):
    engine = Store(network, ranks=4)
    all_go_on(engine, engine.start())
    return "the losses of one machine, bit for bit"


@case()
def store_delay(network):
    network.tell("delay 0.02")
    engine = Store(network, steps=30)
    all_go_on(engine, engine.start())
    return "20 ms each way: goes on"


def stopped(network, engine, fault):
    """Starts ranks, and a fault once they train."""
    runs = engine.start()
    engine.under_way(runs)
    time.sleep(0.3)
    fault()
    return runs


def long_store(network, timeout=TIMEOUT, steps=100000):
    return Store(network, steps=steps, timeout=timeout, pause=2)


@case(some=True)
def store_reset(network):
    runs = stopped(network, long_store(network), lambda: network.tell(f"reset {STORE_PORT} {STORE_PORT}"))
    lost = r"its process ended, or cannot be reached"
    runs[0].fails(TIMEOUT, r"rank 1 of 2 on node1: rank 1 failed: " + lost + r", after all_reduce of step \d+")
    runs[1].fails(TIMEOUT, r"rank 0 of 2 on node0: rank 0 failed: " + lost + r", in all_reduce of step \d+")
    return "an error on both at once"


@case()
def store_link_down_5_s(network):
    engine = long_store(network, timeout=30, steps=1000)
    runs = stopped(network, engine, lambda: network.link("down"))
    time.sleep(5)
    network.link("up")
    all_go_on(engine, runs)
    return "goes on"


@case(some=True)
def store_link_down(network):
    runs = stopped(network, long_store(network), lambda: network.link("down"))
    for run, other in zip(runs, [1, 0], strict=True):
        missing = rf"rank {other} of 2 on node{other}: all_reduce of step \d+: rank {other} did not join within 4s"
        run.fails(TIMEOUT + SLACK, missing)
    return "an error on both, after the time-out"


@case()
def store_clock(network):
    if not (ahead := clock()):
        return "skipped: there is no libfaketime"
    engine = Store(network)
    all_go_on(engine, engine.start(ahead))
    return "3 h ahead: goes on"


@case()
def store_late(network):
    engine = Store(network)
    all_go_on(engine, engine.start("sleep 30"), 60)
    return "30 s late, within the time-out: goes on"


@case(some=True)
def store_too_late(network):
    engine = Store(network, timeout=2)
    engine.start_on(0).fails(2 + SLACK, r"all_gather of the machines: rank 1 did not join within 2s")
    engine.start_on(1).fails(2 + SLACK, r"rank 0 cannot be reached at 10\.97\.0\.1:29500 within 2s")
    return "an error after the time-out"


@case()
def store_twice(network):
    # Machine 1 is started twice before machine 0. Rank 0 refuses the second, or has stopped listening when it comes.
    engine = Store(network, timeout=10, pause=10)
    ones = [engine.start_on(1) for _ in range(2)]
    time.sleep(0.5)
    zero = engine.start_on(0)
    zero.goes_on(engine.expected(), 30)
    codes = sorted(one.end(30) for one in ones)
    error = r"rank 0 at .* refused rank 1: there is a rank 1 already|rank 0 cannot be reached at .* started twice"
    refused = [one for one in ones if re.search(error, one.text())]
    if codes != [0, 1] or len(refused) != 1:
        raise Failed(f"exit codes {codes}\n{ones[0].text()}\n{ones[1].text()}")
    return "the second is refused, at once or after the time-out, and the first goes on"


@case()
def store_main_twice(network):
    engine = Store(network, timeout=TIMEOUT)
    first = engine.start_on(0)
    time.sleep(0.5)
    engine.start_on(0).fails(5, r"port 29500 is taken on this machine")
    one = engine.start_on(1)
    all_go_on(engine, [first, one])
    return "the second is refused, and the first goes on"


@case()
def store_version(network):
    # A program of another version of this crate, which says so in its greeting.
    engine = Store(network, timeout=TIMEOUT)
    other = other_version(network, engine.program)
    zero, one = engine.start_on(0), engine.start_on(1, program=other)
    one.fails(TIMEOUT, r"refused rank 1: rank 0 is a program with fsdp-runtime .*, this one has fsdp-runtime 9\.")
    zero.fails(TIMEOUT + SLACK, r"rank 1 did not join within 4s")
    return "refused; rank 0 names the rank after the time-out"


@case()
def store_config(network):
    engine = Store(network, timeout=TIMEOUT)
    zero, one = engine.start_on(0), engine.start_on(1, ranks=4)
    one.fails(TIMEOUT + SLACK, r"refused rank 2: rank 0 is one of 2 ranks, this one of 4")
    zero.fails(TIMEOUT + SLACK, r"rank 1 did not join within 4s")
    return "refused; rank 0 names the rank after the time-out"


@case(some=True)
def store_secret(network):
    engine = Store(network, timeout=TIMEOUT)
    zero, one = engine.start_on(0), engine.start_on(1, secret="another run's")
    one.fails(TIMEOUT + SLACK, r"does not know the secret of this run")
    zero.fails(TIMEOUT + SLACK, r"rank 1 did not join within 4s")
    return "refused; rank 0 names the rank after the time-out"


# How cases run.


def run_case(network, name):
    """Runs a case. Returns how it failed, if it did."""
    function, _ = CASES[name]
    network.restore()
    begun = time.monotonic()
    failed = None
    try:
        outcome = function(network)
        if left := network.left():
            raise Failed(f"processes are left: {left}")
    except Failed as error:
        outcome, failed = "FAILED", str(error)
    network.end_all()
    print(f"{name:24} {time.monotonic() - begun:5.1f} s  {outcome}", flush=True)
    if failed:
        print(failed, flush=True)
    return failed


# Faults at random.


def drawn(random, network, runs):
    """A fault at random: its description, the function that causes it, and the seconds until that one returns."""
    seconds, machine = random.uniform(0.2, 2 * TIMEOUT), random.randrange(2)

    def paused(begin, end):
        def pause():
            begin()
            time.sleep(seconds)
            end()

        return pause

    def signalled(number, again=None):
        def send():
            inside = {int(pid) for pid in ip("netns", "pids", network.spaces[machine]).split()}
            found = sorted(pid for pid in network.processes() if pid in inside)
            victim = random.choice(found or [0])
            if not victim:
                return
            try:
                os.kill(victim, number)
                if again:
                    time.sleep(seconds)
                    os.kill(victim, again)
            except ProcessLookupError:
                pass

        return send

    down, up = (lambda: network.link("down")), (lambda: network.link("up"))
    drop, passes = (lambda: network.tell("drop")), (lambda: network.tell("pass"))
    return random.choice(
        [
            ("the link is down", down),
            (f"the link is down for {seconds:.1f} s", paused(down, up)),
            ("frames are lost", drop),
            (f"frames are lost for {seconds:.1f} s", paused(drop, passes)),
            ("all connections are reset", lambda: network.tell("reset 1 65535")),
            (f"frames take {seconds:.0f} ms", lambda: network.tell(f"delay {seconds / 1000}")),
            (f"a process of machine {machine} is killed", signalled(signal.SIGKILL)),
            (f"a process of machine {machine} stops for {seconds:.1f} s", signalled(signal.SIGSTOP, signal.SIGCONT)),
        ]
    )


def one_fault(network, random):
    """A run with one fault at random. Returns its description and outcome."""
    network.restore()
    engine = random.choice([Mpi(network, steps=40, timeout=TIMEOUT), Store(network, 2, 2000, TIMEOUT, pause=2)])
    expected = engine.expected()
    runs = engine.start()
    moment = random.uniform(0, 3)
    what, cause = drawn(random, network, runs)
    harmless = what.startswith("frames take")
    time.sleep(moment)
    cause()
    what = f"{engine.kind}, after {moment:.1f} s: {what}"
    codes = []
    try:
        codes = [run.end(2 * TIMEOUT + SLACK + LATE * harmless) for run in runs]
        if harmless or not any(codes):
            runs[0].goes_on(expected, 1)
        elif not any(re.search(NAMED, run.text()) or code < 0 for run, code in zip(runs, codes, strict=True)):
            texts = "\n".join(run.text() for run in runs)
            raise Failed(f"exit codes {codes}, no rank is named\n{texts}")
        if left := network.left(2 * TIMEOUT):
            raise Failed(f"processes are left: {left}")
    except Failed as error:
        return what, f"FAILED: {error}"
    return what, "an error" if any(codes) else "goes on"


def at_random(network, count, seed=None):
    """Runs with faults at random. Returns how many failed."""
    seed = int(seed) if seed else random.randrange(1 << 32)
    source, outcomes = random.Random(seed), []
    print(f"seed {seed}")
    for number in range(int(count)):
        begun = time.monotonic()
        what, outcome = one_fault(network, source)
        network.end_all()
        outcomes.append(outcome)
        print(f"{number + 1:3} {time.monotonic() - begun:5.1f} s  {what}: {outcome}", flush=True)
    failed = sum(outcome.startswith("FAILED") for outcome in outcomes)
    hangs = sum("it hangs" in outcome for outcome in outcomes)
    well = outcomes.count("goes on")
    print(f"{len(outcomes)} runs: {well} went on, {len(outcomes) - well - failed} ended with an error, {hangs} hung")
    return failed


def skipped():
    """Why namespaces cannot be used, if they cannot."""
    if os.geteuid() != 0:
        return "this needs root"
    if not shutil.which("ip"):
        return "there is no program `ip` (on Debian: iproute2)"
    try:
        with Network():
            return None
    except (OSError, AssertionError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be used: {getattr(error, 'stderr', None) or error}"


def main(words):
    if not words:
        sys.exit(__doc__)
    if words[0] == "wire":
        return Wire(words[1:]).run()
    if words == ["list"]:
        return print("\n".join(CASES))
    if reason := skipped():
        return print(f"skipped: {reason}")
    if words[0] == "random":
        with Network() as network:
            sys.exit(1 if at_random(network, *words[1:]) else 0)
    names = {"all": list(CASES), "some": [name for name, (_, some) in CASES.items() if some]}.get(words[0], words)
    if unknown := [name for name in names if name not in CASES]:
        sys.exit(f"unknown: {unknown}\n{__doc__}")
    if not os.environ.get("STORE"):
        print("no STORE: cases of the store are skipped")
        names = [name for name in names if not name.startswith("store-")]
    with Network() as network:
        failed = [name for name in names if run_case(network, name)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Rules of a run on several ranks: ports, shared memory, network interfaces, ranks that wait for each other."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

MASTER_PORT_IN_USE = Rule(
    id="master-port-in-use",
    stage=Stage.RUN,
    title="port {port|of the rendezvous (29500 by default)} is taken by another process",
    fix="end the other job, or take another port",
    steps=(
        step("ss -ltnp sport = :{port|29500}"),
        step("deepspeed --master_port {other_port|29501} ..."),
        instead("torchrun --master_port {other_port|29501} ..."),
    ),
    manual="""Another process listens on the port of the rendezvous.

Rank 0 listens on MASTER_PORT, 29500 by default. A second job on the same node, or a leftover process of the last
one, holds it.

Why it matters: Rank 0 fails, and the other ranks may hang on the other program's listener.""",
    signatures=(
        Signature(
            words="distributed+communication+port eaddrinuse errno+98 winerror+10048 errno+10048 address+use "
            "socket+listen",
            pattern=r"server socket has failed to bind to \S{0,60}?:(?P<port4>\d{2,5}) .{0,60}"
            r"(?:errno: 98\b|address already in use)"
            r"|EADDRINUSE(?:.{0,120}port: (?P<port>\d{2,5}))?|\b[Ee]rrno:? ?98\b|Address already in use"
            r"|WinError 10048|errno: 10048"
            r"|launch distributed communication on port .?(?P<port3>\d{2,5}).?, but another process"
            r"|server socket has failed to listen on any local network address(?:.{0,40}port: (?P<port2>\d{2,5}))?",
            unless=r"tensorboard|jupyter|vllm|uvicorn|gradio|prometheus|exporter|metrics|streamlit|dashboard",
            sample="torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
            "network address. port: 29500, "
            "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        ),
        Signature(
            words="socket+bind",
            pattern=r"server socket has failed to bind to .{0,60}?:(?P<port>\d{2,5}) ",
            unless=r"errno: 9[79]",
            tier=Tier.GENERIC,
            sample="[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:80 (errno: 13 - "
            "Permission denied).",
        ),
    ),
)

NCCL_SHM_TOO_SMALL = Rule(
    id="nccl-shm-too-small",
    stage=Stage.RUN,
    title="/dev/shm is too small for NCCL or the data loaders (docker gives 64 MB)",
    fix="give the container more shared memory (a pod of Kubernetes by an emptyDir with medium: Memory on /dev/shm), and remove "
    "what dead jobs left in it",
    steps=(
        step("df -h /dev/shm"),
        step("docker run --shm-size=16g ..."),
        instead("sudo fuser -v /dev/shm/nccl-* /dev/shm/torch_*", note="files without a process are left over"),
    ),
    manual="""NCCL and torch's data loaders exchange data through /dev/shm, and it is full or too small.

docker gives 64 MB by default; --ipc=host also helps, and on Kubernetes an emptyDir with `medium: Memory` on
/dev/shm. Files of dead jobs (nccl-*, torch_*) fill it too. NCCL_SHM_DISABLE=1 is slow and only a test.

Why it matters: Training ends with a bus error or "unable to mmap", often only with several GPUs or several data
loader workers.""",
    signatures=(
        Signature(
            words="posix_fallocate shared+memory+segment call+shm call+nccl shm+extend failed+extend",
            pattern=r"Call to (?:posix_fallocate|ftruncate|mmap|fallocate|shm_open) failed|while creating shared "
            r"memory segment|failed to extend /dev/shm"
            r"|Error: failed to extend",
            sample="node1:97:176 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left "
            "on device",
        ),
        Signature(
            words="shm+insufficient dataloader+killed out+shared+memory",
            pattern=r"insufficient shared memory \(shm\)|out of shared memory|killed by signal: Bus error",
            sample="RuntimeError: DataLoader worker (pid 412) is killed by signal: Bus error. It is possible "
            "that dataloader's workers are out of "
            "shared memory. Please try to raise your shared memory limit.",
        ),
        Signature(
            words="unable+mmap unable+write unable+open unable+resize unable+allocate shm+space shm+errno shm+enospc",
            pattern=r"unable to (?:mmap|write|open(?! shared memory object)|resize|allocate).{0,60}"
            r"(?:</torch_|/dev/shm|shared memory)"
            r"|unable to open shared memory object <[^>]{1,80}> in [\w-]{1,20} mode: (?!Too )"
            r"|/dev/shm\S{0,160} .{0,60}No space left"
            r"|(?:No space left on device|Errno 28|ENOSPC).{0,60}/dev/shm",
            unless=r"Too many|Cannot alloc",
            sample="RuntimeError: unable to write to file </torch_412_3>: No space left on device (28)",
        ),
        Signature(
            words="unable+mmap unable+allocate",
            pattern=r"unable to (?:mmap|allocate).{0,60}(?:</torch_|/dev/shm|shared memory).{0,60}Cannot allocate memory",
            title="a piece of shared memory could not be mapped: /dev/shm or the host's memory is full, or the process "
            "holds too many pieces (vm.max_map_count)",
            fix="see which of the three it is: df -h /dev/shm, free -g, and the lines of /proc/PID/maps against "
            "vm.max_map_count. Then give the container more shared memory, use fewer data loader workers, or raise the limit",
            steps=(step("df -h /dev/shm"), step("free -g"), step("sysctl vm.max_map_count")),
            sample="RuntimeError: unable to mmap 1024 bytes from file </torch_412_3>: Cannot allocate memory (12)",
        ),
        Signature(
            words="bus+error sigbus exitcode+7 return+7 exit+135 code+135 signal+7",
            pattern=r"Bus error(?: \(core dumped\)|$)|[Ss]ignal 7 \((?:SIGBUS|Bus)|exitcode\s*: -7\b|exits with "
            r"return code = -7\b"
            r"|exit(?:ed with)? (?:code|status):? 135\b|non-zero code: 135\b",
            tier=Tier.GENERIC,
            sample="exitcode  : -7 (pid: 412)",
        ),
    ),
)

NCCL_NETWORK_INTERFACE = Rule(
    id="nccl-network-interface",
    stage=Stage.RUN,
    title="the nodes do not reach each other over the network that was chosen{peer_hint}",
    fix="name the interface that all nodes share, and open the ports between them; dsdoctor comm says who reaches whom",
    steps=(
        step("python -m dsdoctor comm"),
        step("export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0", note="yours: ip -br addr"),
        step("export NCCL_DEBUG=INFO"),
    ),
    manual="""The nodes do not reach each other over the network that NCCL or gloo chose.

Both choose a network interface by themselves, sometimes docker0, a VPN or a link-local address, and use any free
port, not only MASTER_PORT. NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME must be set on every node; deepspeed
forwards only what .deepspeed_env names.

Why it matters: The wrong interface or a firewall ends in failed connects or in a hang.""",
    signatures=(
        Signature(
            words="bootstrap+no interface+found interface+no",
            pattern=r"[Nn]o (?:usable |socket |IP ){0,2}interface found|Bootstrap ?: no |no NCCL_SOCKET_IFNAME "
            r"interface",
            unless=r"NET/IB",
            title="NCCL found no network interface{ifname_hint}",
            sample="node1:12:12 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
        ),
        Signature(
            words="connect+failed connect+returned connecting+address unable+find",
            pattern=r"(?:Connect to|connect to) (?P<peer>[\w.:%-]+<\d+>) (?:failed|returned)|WARN (?:NET/Socket "
            r": )?Call to connect (?:to \S{1,160} )?(?:failed|returned)"
            r"|connecting to address .{0,60}neither AF_INET|Unable to find (?:address|interface) for: "
            r"?(?P<peer2>\S{1,160})",
            sample="node1:12:80 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to "
            "172.17.0.1<45763> failed : No route to host",
        ),
        Signature(
            words="client+socket",
            pattern=r"[Tt]he client socket has timed out after .{1,24} while trying to connect to "
            r"\(?(?P<peer>[\w.:, -]{3,80})\)",
            title="no answer from the rendezvous at {peer}",
            fix="check that rank 0 runs there, that MASTER_ADDR is right on every node, and that its port is open",
            steps=(step("python -m dsdoctor comm"), step("nc -zv MASTER_ADDR MASTER_PORT")),
            sample="torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while "
            "trying to connect to (10.0.0.1, "
            "29500).",
        ),
        Signature(
            words="connect+timed+timeout",
            pattern=r"^RuntimeError: connect\(\) timed out\. Original timeout was \d{1,12} ms",
            title="a node gets no answer from the master: nothing is reached at MASTER_ADDR and MASTER_PORT from here",
            fix="set MASTER_ADDR (deepspeed: --master_addr) to an address of rank 0's node that every node reaches, not "
            "localhost or a name of a private network, and open the port in the firewall",
            steps=(step("python -m dsdoctor comm"), step("nc -zv MASTER_ADDR MASTER_PORT")),
            sample="RuntimeError: connect() timed out. Original timeout was 1800000 ms.",
        ),
        Signature(
            words="gaierror",
            pattern=r"socket\.gaierror: \[Errno -[235]\]",
            after=r"torch[/\\]distributed|init_process_group|rendezvous|mpi_discovery|deepspeed[/\\]comm",
            tier=Tier.GENERIC,
            title="a host's name does not resolve on this node",
            fix="give MASTER_ADDR a name or an address that every node resolves",
            steps=(step("getent hosts MASTER_ADDR"), step("python -m dsdoctor comm")),
            sample='  File "/venv/torch/distributed/rendezvous.py", line 185, in _create_c10d_store\n'
            "socket.gaierror: [Errno -2] Name or service not known",
        ),
        Signature(
            words="gai retrieved",
            pattern=r"network addresses of \(?(?P<peer>[\w.:, -]{3,80})\) cannot be retrieved",
            title="the name of the rendezvous, {peer}, does not resolve on this node",
            fix="give MASTER_ADDR a name or an address that every node resolves",
            steps=(step("getent hosts MASTER_ADDR"), step("python -m dsdoctor comm")),
            sample="torch.distributed.DistNetworkError: The IPv6 network addresses of (worker-1, 29500) cannot "
            "be retrieved "
            "(gai error: -2 - Name or service not known).",
        ),
        Signature(
            words="socketpollconnect socketstartconnect returned+retrying connect+exceeded",
            pattern=r"(?:connect(?: to (?P<peer>\S{1,60}))? returned .{1,60}, (?:retrying \((?P<try>\d+)/(?P=try)\)"
            r"|exceeded error retry))",
            tier=Tier.GENERIC,
            title="the other node never answered: NCCL gave up after its last try{peer_hint}",
            sample="node1:118:118 [0] NCCL INFO socketPollConnect: connect returned No route to host, retrying "
            "(34/34) after "
            "sleep for 3400 msec",
        ),
        Signature(
            words="call+recv call+send",
            pattern=r"Call to (?:recv|send) (?:from|to) (?P<peer>\S{1,60}) failed : (?:Connection reset by "
            r"peer|Broken pipe|Connection timed "
            r"out)",
            tier=Tier.GENERIC,
            title="the connection to {peer} broke: the rank there ended first, or the network did",
            sample="node1:97:176 [0] misc/socket.cc:58 NCCL WARN Call to recv from 10.0.0.2<41743> failed : "
            "Connection reset by peer",
        ),
        Signature(
            words="recv+bytes rendezvousconnectionerror distnetworkerror+reset",
            pattern=r"Error: failed to recv, got 0 bytes|DistNetworkError: Connection reset by "
            r"peer|RendezvousConnectionError: The connection to the C10d "
            r"store has failed",
            tier=Tier.GENERIC,
            title="the connection to the store of rank 0 broke: that rank ended first, or the network did",
            sample="torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely "
            "closed. Did the remote "
            "server shutdown or crash?",
        ),
        Signature(
            words="connectfullmesh gloo+refused gloo+route gloo+timed gloo+timeout",
            pattern=r"connectFullMesh failed|"
            r"gloo/transport/tcp/.{0,160}(?:Connection refused|No route to host|Connection timed out)",
            tier=Tier.GENERIC,
            sample="RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
        ),
        Signature(
            words="completion+ib",
            pattern=r"NET/IB ?: .{0,60}[Gg]ot completion .{0,120}(?:error|status=) ?(?:12\b|IBV_WC_RETRY_EXC)",
            title="InfiniBand or RoCE: the other side did not answer (error 12, retries used up)",
            fix="see first whether the rank on the other node ended before. Else look at the link (ibstat, "
            "cables, switch; for RoCE flow "
            "control and NCCL_IB_GID_INDEX), and give it more time: NCCL_IB_TIMEOUT=22. NCCL_IB_DISABLE=1 "
            "tells whether it is "
            "InfiniBand",
            steps=(step("ibstat"), step("python -m dsdoctor comm"), step("export NCCL_IB_TIMEOUT=22")),
            sample="node1:12:90 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with error 12, "
            "opcode 0, len 0, vendor err 129",
        ),
        Signature(
            words="ibv_modify_qp",
            pattern=r"ibv_modify_qp failed with (?:error )?(?P<problem>[A-Za-z ]{3,40})",
            title="InfiniBand or RoCE: the queue pair could not be connected ({problem}): the GIDs or the "
            "chosen cards do not fit",
            fix="name the cards that all nodes share (NCCL_IB_HCA), and for RoCE the index of the routable GID "
            "(NCCL_IB_GID_INDEX, often 3; "
            "show_gids lists them); NCCL_IB_DISABLE=1 tells whether it is InfiniBand",
            steps=(step("ibv_devinfo -v"), step("python -m dsdoctor comm"), step("export NCCL_IB_GID_INDEX=3")),
            sample="node1:12:90 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with error "
            "Invalid argument",
        ),
        Signature(
            words="async+event",
            pattern=r"NET/IB ?: .{0,60}Got (?:non-)?(?:fatal )?async(?:hronous)? (?:fatal )?event ?(?:on \S{1,40})?: "
            r"?(?P<problem>local catastrophic error|port error|device fatal|link down|GID table "
            r"change|client reregistration)",
            tier=Tier.GENERIC,
            title="InfiniBand or RoCE: the card itself reports a fault on this node ({problem})",
            fix="look at the card, its cable and its switch port: ibstat, ibqueryerrors, dmesg; a link that goes "
            "down and up ends NCCL's connections. Take the node out, or run with the other cards (NCCL_IB_HCA)",
            steps=(step("ibstat"), step("sudo dmesg -T | grep -i mlx5"), step("python -m dsdoctor comm")),
            sample="node1:815:864 [0] transport/net_ib.cc:80 NCCL WARN NET/IB : Got async event : port error",
        ),
        Signature(
            words="net+ib ibv_modify_qp ibv_reg_mr ibv_create_qp ibv_reg_mr_iova2 wrap",
            pattern=r"NET/IB ?: .{0,40}[Gg]ot completion .{0,80}(?:error|status=) ?(?:\d|IBV)|ibv_\w{1,60} failed",
            unless=r"ibv_(?:reg_mr\w{0,12}|create_cq|create_qp) failed with error Cannot allocate memory",
            title="InfiniBand or RoCE failed between the nodes",
            fix="check the links (ibstat), NCCL_IB_HCA and NCCL_IB_GID_INDEX; NCCL_IB_DISABLE=1 tells whether it "
            "is InfiniBand",
            steps=(step("ibstat"), step("python -m dsdoctor comm")),
            sample="node1:12:90 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with error 12, "
            "opcode 0, len 0, vendor err 129",
        ),
        Signature(
            words="ncclsystemerror unhandled+system ncclremoteerror remote+exited",
            pattern=r"ncclSystemError|unhandled system error|ncclRemoteError|remote process exited or there was "
            r"a network error",
            tier=Tier.GENERIC,
            title="NCCL's system call failed: the network, or shared memory",
            sample="ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
            "error.",
        ),
    ),
    explained_by=("nccl-shm-too-small", "host-ram-oom", "efa-send-failed"),
)

RULES = (
    MASTER_PORT_IN_USE,
    NCCL_SHM_TOO_SMALL,
    NCCL_NETWORK_INTERFACE,
)

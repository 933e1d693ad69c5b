/* What the two programs and the server share. src/dsec/kernel/netmaps.py packs and unpacks the same records; a test holds their sizes equal.
 *
 * A sandbox is known by `ifindex`, the number of its link in the router's namespace: the kernel never gives one out twice there, so
 * nothing that was kept for one tenant of a slot can be taken for the next one's.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define ALLOWS 16 /* rules of one prefix */

enum verdict { NEXT = -1, DROP = 2 };
enum via { DIRECT = 0, RELAY = 1 };
/* Marks that nftables in the router acts upon. Nothing outside of the router can set one: they are cleared between namespaces. */
enum mark { MARK_REFUSED = 0xd5ec0001, MARK_RELAY = 0xd5ec0002 };
enum reason {
	BEGUN = 0, NOT_ALLOWED, NEVER_ALLOWED, SPOOFED, MALFORMED, FRAGMENT, PROTOCOL, NO_FLOW, FLOWS, RATE, CUT, UNSOLICITED,
	OVER, /* no refusal: a flow whose place another took, before the server saw its end */
};
enum state { FIN_OUT = 1, FIN_IN = 2, RESET = 4, ENDED = 8, ANSWERED = 16 };

struct address {
	__u8 bytes[16]; /* IPv4: the first four */
};

/* The node: ranges of sandboxes' addresses, and the gateway. */
struct node {
	__be32 net4, mask4, gateway4;
	__u32 relay_port; /* of the gateway: reached by being sent there alone */
	struct address net6, gateway6; /* a /64 */
};

/* What the server says of a sandbox. A switch of its policy writes `view` last. */
struct box {
	__u32 slot, view, group, netns;
	__be32 v4;
	__u32 flows, new_flows_s, reserved;
	struct address v6;
	__u64 egress_bytes_s, ingress_bytes_s; /* 0: not bounded */
};

/* What the programs count for a sandbox. Times are when the next is due (virtual scheduling). */
struct meter {
	__u64 egress_due, ingress_due, flow_due, refusal_due;
	__u64 opened, refused, policed, dropped;
};

struct allow {
	__u8 protocol, via; /* protocol 0: any of TCP, UDP, ICMP */
	__u16 low, high, reserved;
	__u64 expires; /* nanoseconds since boot; 0: never */
};

struct allows_key {
	__u32 prefix;
	__u8 view[4], family;
	struct address network;
} __attribute__((packed));

struct allows {
	struct allow rules[ALLOWS];
};

struct flow_key {
	__u32 ifindex;
	__u8 family, protocol;
	__u16 port; /* the sandbox's; the identifier of an echo */
	__u16 far_port, reserved;
	struct address far;
};

struct flow {
	__u32 view;
	__u8 via, state;
	__u16 shared; /* beyond the sandbox's own: one of those that all have together */
	__u64 begun, seen, bytes_out, bytes_in;
	__u32 pid;
	__u8 comm[16];
	__u32 reserved_too;
};

struct event {
	__u64 at;
	__u32 slot;
	__u8 reason, via, family, protocol;
	__u16 port, far_port;
	struct address far;
	__u32 pid;
	__u8 comm[16];
	__u64 begun, bytes_out, bytes_in; /* of OVER */
};

/* A connection as the observer saw it begin. */
struct caller_key {
	__u32 netns;
	__u8 family, protocol;
	__u16 port, far_port, reserved;
	struct address far;
};

struct caller {
	__u32 pid;
	__u8 comm[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
	__type(key, struct caller_key);
	__type(value, struct caller);
} callers SEC(".maps");

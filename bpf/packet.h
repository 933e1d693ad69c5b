/* Reads what a packet says of itself; both programs judge by this alone. */
#pragma once

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include "addresses.h"

struct packet {
	__u8 family, protocol, flags, type; /* flags: of TCP; type: of ICMP */
	__u16 source, destination;	    /* ports; of an echo, its identifier twice */
	struct address from, to;
	__u32 inner; /* offset of what comes after the ICMP header */
};

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16
#define PLAIN_HEADER 0x45 /* version 4, no options */
#define ANY_FRAGMENT 0x3fff
#define ECHO_REQUEST 8
#define ECHO_REPLY 0
#define ECHO6_REQUEST 128
#define ECHO6_REPLY 129

/* `whole`: not what an error quotes, of which eight bytes are enough. */
static __always_inline int read_transport(struct __sk_buff *skb, __u32 at, struct packet *p, int whole)
{
	__u8 head[14];
	if (p->protocol == IPPROTO_TCP && whole) {
		if (bpf_skb_load_bytes(skb, at, head, 14))
			return MALFORMED;
		p->flags = head[13];
	} else if (bpf_skb_load_bytes(skb, at, head, 8)) {
		return MALFORMED;
	}
	if (p->protocol == IPPROTO_ICMP || p->protocol == IPPROTO_ICMPV6) {
		p->type = head[0];
		p->inner = at + 8;
		p->source = p->destination = (head[4] << 8) | head[5];
		return 0;
	}
	p->source = (head[0] << 8) | head[1];
	p->destination = (head[2] << 8) | head[3];
	return 0;
}

/* The IP packet at `at`. 0, or the reason why it is none that may pass. */
static __always_inline int read_v4(struct __sk_buff *skb, __u32 at, struct packet *p, int whole)
{
	struct iphdr ip;
	if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)))
		return MALFORMED;
	p->family = 4;
	__builtin_memcpy(p->from.bytes, &ip.saddr, 4);
	__builtin_memcpy(p->to.bytes, &ip.daddr, 4);
	p->protocol = ip.protocol;
	if (*(__u8 *)&ip != PLAIN_HEADER)
		return MALFORMED;
	if (ip.frag_off & bpf_htons(ANY_FRAGMENT))
		return FRAGMENT;
	if (whole && (bpf_ntohs(ip.tot_len) < sizeof(ip) || at + bpf_ntohs(ip.tot_len) > skb->len) && !skb->gso_segs)
		return MALFORMED;
	if (ip.protocol != IPPROTO_TCP && ip.protocol != IPPROTO_UDP && ip.protocol != IPPROTO_ICMP)
		return PROTOCOL;
	return read_transport(skb, at + sizeof(ip), p, whole);
}

static __always_inline int read_v6(struct __sk_buff *skb, __u32 at, struct packet *p, int whole)
{
	struct ipv6hdr ip;
	if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)))
		return MALFORMED;
	p->family = 6;
	__builtin_memcpy(p->from.bytes, &ip.saddr, 16);
	__builtin_memcpy(p->to.bytes, &ip.daddr, 16);
	p->protocol = ip.nexthdr;
	if (*(__u8 *)&ip >> 4 != 6)
		return MALFORMED;
	if (ip.nexthdr == IPPROTO_FRAGMENT)
		return FRAGMENT;
	/* Any other extension header is a protocol of its own here, so none is walked past. */
	if (ip.nexthdr != IPPROTO_TCP && ip.nexthdr != IPPROTO_UDP && ip.nexthdr != IPPROTO_ICMPV6)
		return PROTOCOL;
	return read_transport(skb, at + sizeof(ip), p, whole);
}

static __always_inline int read_packet(struct __sk_buff *skb, struct packet *p)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return read_v4(skb, ETH_HLEN, p, 1);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return read_v6(skb, ETH_HLEN, p, 1);
	return PROTOCOL;
}

static __always_inline int is_multicast(const struct packet *p)
{
	return p->family == 4 ? (p->to.bytes[0] & 0xf0) == 0xe0 : p->to.bytes[0] == 0xff;
}

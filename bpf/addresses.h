/* Which addresses are the node's own, and which no rule opens. FORBIDDEN of src/dsec/rules/netpolicy.py says the same; a test holds the two equal. */
#pragma once

#include "maps.h"

static __always_inline int same(const struct address *a, const struct address *b)
{
	const __u32 *x = (const __u32 *)a, *y = (const __u32 *)b;
	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3];
}

static __always_inline int in_range(const struct node *node, const struct address *a, __u8 family)
{
	__be32 v4;
	const __u32 *w = (const __u32 *)a, *net = (const __u32 *)&node->net6;

	if (family == 6)
		return w[0] == net[0] && w[1] == net[1];
	__builtin_memcpy(&v4, a->bytes, 4);
	return (v4 & node->mask4) == node->net4;
}

static __always_inline int is_gateway(const struct node *node, const struct address *a, __u8 family)
{
	return family == 6 ? same(a, &node->gateway6) : *(const __u32 *)a->bytes == node->gateway4;
}

/* What no rule can open: this host and link, everybody, nobody, addresses that hold others in them, and where clouds keep secrets. */
static __always_inline int never(const struct node *node, const struct address *a, __u8 family)
{
	const __u8 *b = a->bytes;
	const __u32 *w = (const __u32 *)b;

	if (in_range(node, a, family))
		return !is_gateway(node, a, family);
	if (family == 4)
		return b[0] == 0 || b[0] == 127 || b[0] >= 224 || (b[0] == 169 && b[1] == 254) ||
		       w[0] == bpf_htonl(0x646464c8) || /* 100.100.100.200 */
		       w[0] == bpf_htonl(0xa83f8110) || /* 168.63.129.16 */
		       w[0] == bpf_htonl(0xc00000c0);	/* 192.0.0.192 */
	if (!w[0] && !w[1])
		return 1; /* ::, ::1, ::ffff:a.b.c.d and other forms of IPv4 in IPv6 */
	if (b[0] == 0xff || (b[0] == 0xfe && b[1] >= 0x80) || (b[0] == 0x20 && b[1] == 0x02))
		return 1; /* multicast; link-local and site-local; 6to4 */
	if (w[0] == bpf_htonl(0x0064ff9b) || w[0] == bpf_htonl(0x20010000))
		return 1; /* NAT64; Teredo */
	return !w[2] && w[3] == bpf_htonl(0x0254) &&
	       ((w[0] == bpf_htonl(0xfd000ec2) && !w[1]) || (w[0] == bpf_htonl(0xfd2000ce) && !w[1]));
}

/* Judges every packet between a sandbox and its router, at the router's end of its link, in both directions. What is not allowed by
 * a rule of the sandbox's own view, or the answer to what was, does not pass. Nothing inside the sandbox can reach this hook.
 */
#include "packet.h"
#include "tables.h"

#define SECOND 1000000000ULL
#define REFUSALS_S 200 /* refusals and events a second that one sandbox is told of */
#define BURST_BYTES (128 << 10)
#define OWN_FLOWS 64 /* that a sandbox has whatever the others hold; 2,048 of them have room */
#define SHARED_FLOWS (1 << 17) /* what all have together beyond that */

/* All that one judgement is about. */
struct hand {
	struct __sk_buff *skb;
	struct node *node;
	struct box *box;
	struct meter *meter;
	__u64 now;
};

/* True while `due` is not further ahead than `burst`; then it moves on by `cost`. Two CPUs may both take the last turn. */
static __always_inline int in_turn(__u64 *due, __u64 now, __u64 cost, __u64 burst)
{
	__u64 from = *due > now ? *due : now;
	if (from - now > burst)
		return 0;
	*due = from + cost;
	return 1;
}

static __always_inline int within_rate(__u64 *due, __u64 now, __u32 bytes, __u64 rate)
{
	__u64 burst = SECOND / 4, least;
	if (!rate)
		return 1;
	least = BURST_BYTES * SECOND / rate;
	return in_turn(due, now, bytes * SECOND / rate, burst > least ? burst : least);
}

static __always_inline struct event *event_of(struct hand *h, const struct packet *p, int reason, int via)
{
	struct event *event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	__u32 zero = 0;
	__u64 *count;

	if (!event) {
		count = bpf_map_lookup_elem(&lost, &zero);
		if (count)
			__sync_fetch_and_add(count, 1);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->at = h->now;
	event->slot = h->box->slot;
	event->reason = reason;
	event->via = via;
	event->family = p->family;
	event->protocol = p->protocol;
	event->port = p->source;
	event->far_port = p->destination;
	event->far = p->to;
	return event;
}

static __always_inline void tell(struct hand *h, const struct packet *p, int reason, int via, const struct flow *flow)
{
	struct event *event = event_of(h, p, reason, via);

	if (!event)
		return;
	event->pid = flow->pid;
	__builtin_memcpy(event->comm, flow->comm, sizeof(event->comm));
	bpf_ringbuf_submit(event, 0);
}

static __always_inline void share(__u64 change)
{
	__u32 first = 0;
	__u64 *taken = bpf_map_lookup_elem(&shared, &first);

	if (taken)
		__sync_fetch_and_add(taken, change);
}

/* Makes way for another flow of the same ends; the record goes into an event, since nobody will find it any more. */
static __noinline int give_way(struct hand *h, const struct packet *p, const struct flow_key *key)
{
	__u64 begun, out, back;
	struct event *event;
	struct flow *flow;
	__u16 of_all;

	if (!h || !p || !key || !h->meter || !h->box)
		return 0;
	flow = bpf_map_lookup_elem(&flows, key);
	if (!flow)
		return 0;
	begun = flow->begun;
	out = flow->bytes_out;
	back = flow->bytes_in;
	of_all = flow->shared;
	if (bpf_map_delete_elem(&flows, key))
		return 0;
	__sync_fetch_and_sub(&h->meter->opened, 1);
	if (of_all)
		share(-1);
	event = event_of(h, p, OVER, DIRECT);
	if (event) {
		event->begun = begun;
		event->bytes_out = out;
		event->bytes_in = back;
		bpf_ringbuf_submit(event, 0);
	}
	return 0;
}

static __always_inline void who(struct hand *h, const struct packet *p, struct flow *flow)
{
	struct caller_key key = {};
	struct caller *caller;

	key.netns = h->box->netns;
	key.family = p->family;
	key.protocol = p->protocol;
	key.port = p->source;
	key.far_port = p->destination;
	key.far = p->to;
	caller = bpf_map_lookup_elem(&callers, &key);
	if (caller) {
		flow->pid = caller->pid;
		__builtin_memcpy(flow->comm, caller->comm, sizeof(flow->comm));
	}
}

/* The router answers for us, by a reset or "prohibited"; what has no answer, or comes too often, is dropped. */
static __noinline int refuse(struct hand *h, const struct packet *p, int reason)
{
	struct flow flow = {};

	if (!h || !p || !h->meter)
		return DROP;
	__sync_fetch_and_add(&h->meter->refused, 1);
	if (!in_turn(&h->meter->refusal_due, h->now, SECOND / REFUSALS_S, SECOND))
		return DROP;
	who(h, p, &flow);
	tell(h, p, reason, DIRECT, &flow);
	if (reason == SPOOFED || reason == MALFORMED || reason == FRAGMENT || p->flags & TCP_RST)
		return DROP;
	h->skb->mark = MARK_REFUSED;
	return NEXT;
}

/* Whether the sandbox that has this address is of the same private network. */
static __always_inline int is_companion(struct hand *h, const struct address *a, __u8 family)
{
	__u32 number, slot, *group;

	if (!h->box->group)
		return 0;
	__builtin_memcpy(&number, family == 6 ? &a->bytes[12] : &a->bytes[0], 4);
	slot = bpf_ntohl(number) - (family == 6 ? 0 : bpf_ntohl(h->node->net4)) - 256;
	if (slot == h->box->slot)
		return 0;
	group = bpf_map_lookup_elem(&groups, &slot);
	return group && *group == h->box->group;
}

/* How the view lets this destination be reached: DIRECT, RELAY, or -1. */
static __noinline int permitted(struct hand *h, const struct packet *p)
{
	struct allows_key key = {};
	struct allows *found;
	__u32 view;

	if (!h || !p || !h->box)
		return -1;
	view = bpf_htonl(h->box->view);
	key.prefix = 40 + (p->family == 6 ? 128 : 32);
	__builtin_memcpy(key.view, &view, 4);
	key.family = p->family;
	key.network = p->to;
	found = bpf_map_lookup_elem(&rules, &key);
	if (!found)
		return -1;
	for (int i = 0; i < ALLOWS; i++) {
		struct allow *rule = &found->rules[i];
		int icmp = p->protocol == IPPROTO_ICMP || p->protocol == IPPROTO_ICMPV6;
		if (!rule->high && !rule->low && !rule->protocol && !rule->reserved)
			break;
		if (rule->expires && rule->expires < h->now)
			continue;
		if (rule->protocol && rule->protocol != (icmp ? IPPROTO_ICMP : p->protocol))
			continue;
		if (icmp || (p->destination >= rule->low && p->destination <= rule->high))
			return rule->via;
	}
	return -1;
}

static __always_inline void key_of(struct hand *h, const struct packet *p, int outward, struct flow_key *key)
{
	key->ifindex = h->skb->ifindex;
	key->family = p->family;
	key->protocol = p->protocol;
	key->port = outward ? p->source : p->destination;
	key->far_port = outward ? p->destination : p->source;
	key->far = outward ? p->to : p->from;
}

static __always_inline int pass(struct hand *h, struct flow *flow)
{
	if (!within_rate(&h->meter->egress_due, h->now, h->skb->len, h->box->egress_bytes_s)) {
		__sync_fetch_and_add(&h->meter->policed, 1);
		return DROP;
	}
	__sync_fetch_and_add(&flow->bytes_out, h->skb->len - ETH_HLEN);
	if (flow->via == RELAY)
		h->skb->mark = MARK_RELAY;
	return NEXT;
}

/* Whether the sandbox may have one more flow: 1 of its own, 2 of what all share, 0 none. */
static __always_inline int room(struct hand *h)
{
	__u32 ifindex = h->skb->ifindex, first = 0, second = 1;
	__u64 *gone = bpf_map_lookup_elem(&swept, &ifindex), open = h->meter->opened - (gone ? *gone : 0), *taken, *back;

	if (open >= h->box->flows)
		return 0;
	if (open < OWN_FLOWS)
		return 1;
	taken = bpf_map_lookup_elem(&shared, &first);
	back = bpf_map_lookup_elem(&shared, &second);
	return taken && back && *taken - *back < SHARED_FLOWS ? 2 : 0;
}

static __always_inline int begin(struct hand *h, const struct packet *p, const struct flow_key *key)
{
	struct flow flow = {}, *there;
	int via, place;

	if (p->protocol == IPPROTO_TCP && (p->flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) != TCP_SYN)
		return refuse(h, p, NO_FLOW);
	if (never(h->node, &p->to, p->family) ||
	    (is_gateway(h->node, &p->to, p->family) && p->destination == h->node->relay_port))
		return refuse(h, p, NEVER_ALLOWED);
	via = permitted(h, p);
	if (via < 0 || (via == RELAY && p->protocol != IPPROTO_TCP))
		return refuse(h, p, NOT_ALLOWED);
	place = room(h);
	if (!place)
		return refuse(h, p, FLOWS);
	if (h->box->new_flows_s && !in_turn(&h->meter->flow_due, h->now, SECOND / h->box->new_flows_s, SECOND))
		return refuse(h, p, RATE);
	flow.view = h->box->view;
	flow.via = via;
	flow.shared = place == 2;
	flow.begun = flow.seen = h->now;
	who(h, p, &flow);
	if (bpf_map_update_elem(&flows, key, &flow, BPF_NOEXIST)) {
		there = bpf_map_lookup_elem(&flows, key);
		return there && !(there->state & ENDED) ? pass(h, there) : refuse(h, p, FLOWS);
	}
	__sync_fetch_and_add(&h->meter->opened, 1);
	if (flow.shared)
		share(1);
	if (in_turn(&h->meter->refusal_due, h->now, SECOND / REFUSALS_S, SECOND))
		tell(h, p, BEGUN, via, &flow);
	there = bpf_map_lookup_elem(&flows, key);
	return there ? pass(h, there) : DROP;
}

/* False where the sandbox's present view does not let the flow go on in its way. */
static __always_inline int goes_on(struct hand *h, struct flow *flow, const struct packet *out)
{
	__u32 view = h->box->view;

	if (flow->state & ENDED)
		return 0;
	if (flow->view == view)
		return 1;
	if (permitted(h, out) == flow->via) {
		flow->view = view;
		return 1;
	}
	flow->state |= ENDED;
	return 0;
}

/* A new connection on the ports of one that has ended; where nothing says "new", whatever comes after the end. */
static __always_inline int renews(const struct packet *p, const struct flow *flow)
{
	__u8 over = flow->state & (ENDED | RESET);

	if (p->protocol != IPPROTO_TCP)
		return flow->state & ENDED;
	return (p->flags & (TCP_SYN | TCP_ACK)) == TCP_SYN &&
	       (over || (flow->state & (FIN_OUT | FIN_IN)) == (FIN_OUT | FIN_IN));
}

static __always_inline int meet(struct hand *h)
{
	__u32 zero = 0, ifindex = h->skb->ifindex;

	h->node = bpf_map_lookup_elem(&nodes, &zero);
	h->box = bpf_map_lookup_elem(&boxes, &ifindex);
	h->meter = bpf_map_lookup_elem(&meters, &ifindex);
	h->now = bpf_ktime_get_boot_ns();
	return h->node && h->box && h->meter;
}

SEC("classifier")
int from_sandbox(struct __sk_buff *skb)
{
	struct hand h = {.skb = skb};
	struct packet p = {};
	struct flow_key key = {};
	struct flow *flow;
	int wrong;

	if (!meet(&h))
		return DROP;
	wrong = read_packet(skb, &p);
	if (!p.family || is_multicast(&p)) {
		/* ARP, and what every host tells its link by itself: of no interest to anybody. */
		__sync_fetch_and_add(&h.meter->dropped, 1);
		return DROP;
	}
	if (p.family == 6 ? !same(&p.from, &h.box->v6) : *(__u32 *)p.from.bytes != h.box->v4)
		return refuse(&h, &p, SPOOFED);
	if (wrong)
		return refuse(&h, &p, wrong);
	if (in_range(h.node, &p.to, p.family) && is_companion(&h, &p.to, p.family)) {
		if (within_rate(&h.meter->egress_due, h.now, skb->len, h.box->egress_bytes_s))
			return NEXT;
		__sync_fetch_and_add(&h.meter->policed, 1);
		return DROP;
	}
	if ((p.protocol == IPPROTO_ICMP && p.type != ECHO_REQUEST) ||
	    (p.protocol == IPPROTO_ICMPV6 && p.type != ECHO6_REQUEST)) {
		__sync_fetch_and_add(&h.meter->dropped, 1);
		return DROP;
	}
	key_of(&h, &p, 1, &key);
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow)
		return begin(&h, &p, &key);
	if (renews(&p, flow)) {
		give_way(&h, &p, &key);
		return begin(&h, &p, &key);
	}
	if (!goes_on(&h, flow, &p))
		return refuse(&h, &p, CUT);
	flow->seen = h.now;
	if (p.protocol == IPPROTO_TCP && p.flags & (TCP_FIN | TCP_RST))
		flow->state |= p.flags & TCP_RST ? RESET : FIN_OUT;
	return pass(&h, flow);
}

/* An error about a packet that the sandbox sent belongs to that packet's flow. */
static __always_inline int read_error(struct hand *h, struct packet *p)
{
	struct packet inner = {};

	if (p->protocol == IPPROTO_ICMP ? p->type != 3 && p->type != 11 && p->type != 12 : p->type < 1 || p->type > 4)
		return 0;
	if (p->family == 4 ? read_v4(h->skb, p->inner, &inner, 0) : read_v6(h->skb, p->inner, &inner, 0))
		return 0;
	if (!same(&inner.from, &p->to))
		return 0;
	*p = inner;
	return 1;
}

static __always_inline int drop(struct hand *h)
{
	__sync_fetch_and_add(&h->meter->dropped, 1);
	return DROP;
}

SEC("classifier")
int to_sandbox(struct __sk_buff *skb)
{
	struct hand h = {.skb = skb};
	struct packet p = {}, out = {};
	struct flow_key key = {};
	struct flow *flow;
	__u8 flags;
	int outward = 0;

	if (!meet(&h))
		return DROP;
	if (read_packet(skb, &p) || (p.family == 6 ? !same(&p.to, &h.box->v6) : *(__u32 *)p.to.bytes != h.box->v4))
		return drop(&h);
	if (!within_rate(&h.meter->ingress_due, h.now, skb->len, h.box->ingress_bytes_s)) {
		__sync_fetch_and_add(&h.meter->policed, 1);
		return DROP;
	}
	/* The router's own answer to what was refused. */
	if (skb->mark == MARK_REFUSED)
		return NEXT;
	if (in_range(h.node, &p.from, p.family) && is_companion(&h, &p.from, p.family))
		return NEXT;
	flags = p.flags;
	if (p.protocol == IPPROTO_ICMP ? p.type != ECHO_REPLY : p.protocol == IPPROTO_ICMPV6 && p.type != ECHO6_REPLY) {
		if (!read_error(&h, &p))
			return drop(&h);
		outward = 1;
		flags = 0;
	}
	key_of(&h, &p, outward, &key);
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow)
		return drop(&h);
	out.family = p.family;
	out.protocol = p.protocol;
	out.destination = key.far_port;
	out.to = key.far;
	if (!goes_on(&h, flow, &out))
		return drop(&h);
	flow->seen = h.now;
	flow->state |= ANSWERED;
	if (p.protocol == IPPROTO_TCP && flags & (TCP_FIN | TCP_RST))
		flow->state |= flags & TCP_RST ? RESET : FIN_IN;
	__sync_fetch_and_add(&flow->bytes_in, skb->len - ETH_HLEN);
	return NEXT;
}

char licence[] SEC("license") = "GPL";

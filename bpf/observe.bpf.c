/* On the sandbox's end of its link: notes which process began a connection, for the log. It judges nothing.
 *
 * The namespace is that of the current task, not of the packet: where the kernel sends later, in another's context, the note is
 * kept under that other's namespace and never found.
 */
#include "packet.h"

struct ns_common {
	unsigned int inum;
} __attribute__((preserve_access_index));
struct net {
	struct ns_common ns;
} __attribute__((preserve_access_index));
struct nsproxy {
	struct net *net_ns;
} __attribute__((preserve_access_index));
struct task_struct {
	int tgid;
	struct nsproxy *nsproxy;
	char comm[16];
} __attribute__((preserve_access_index));

SEC("classifier")
int observe(struct __sk_buff *skb)
{
	struct packet p = {};
	struct task_struct *task = bpf_get_current_task_btf();
	struct caller_key key = {};
	struct caller caller = {};

	if (read_packet(skb, &p) || (p.protocol == IPPROTO_TCP && (p.flags & (TCP_SYN | TCP_ACK)) != TCP_SYN))
		return NEXT;
	key.netns = task->nsproxy->net_ns->ns.inum;
	key.family = p.family;
	key.protocol = p.protocol;
	key.port = p.source;
	key.far_port = p.destination;
	key.far = p.to;
	caller.pid = task->tgid;
	bpf_probe_read_kernel(caller.comm, sizeof(caller.comm), task->comm);
	bpf_map_update_elem(&callers, &key, &caller, BPF_ANY);
	return NEXT;
}

char licence[] SEC("license") = "GPL";

/* SPDX-License-Identifier: Apache-2.0
 *
 * Slow links on one machine, without network namespaces: to be preloaded (LD_PRELOAD) into every rank.
 *
 * The kernel paces each TCP connection between ranks of different nodes at COMMOPT_PACE_BYTES a second. A rank's node is
 * RANK / COMMOPT_RANKS_PER_NODE, as torchrun sets them. Whoever connects has to know the node of its peer: so each node
 * has a range of ports of its own, from which its ranks' listeners get one when they ask for any. Whoever accepts does
 * not know it; there all connections are paced. With NCCL only the side that has connected sends data.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef SO_MAX_PACING_RATE
#define SO_MAX_PACING_RATE 47
#endif

enum { FIRST_PORT = 20000, PORTS_PER_NODE = 1000, MOST_NODES = 12 };

static long number(const char *name) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : -1;
}

/* This rank's node; -1 in a process that is no rank. */
static long own_node(void) {
    long rank = number("RANK"), per_node = number("COMMOPT_RANKS_PER_NODE");
    long node = rank < 0 || per_node < 1 ? -1 : rank / per_node;
    return node < MOST_NODES ? node : -1;
}

/* The port of a TCP address, 0 for any; -1 for other addresses. It has the same place in IPv4 and IPv6. */
static int port_of(int fd, const struct sockaddr *address) {
    int type = 0;
    socklen_t length = sizeof type;
    if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return -1;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) || type != SOCK_STREAM) return -1;
    return ntohs(((const struct sockaddr_in *)address)->sin_port);
}

static long node_of(int port) {
    long node = (port - FIRST_PORT) / PORTS_PER_NODE;
    return port < FIRST_PORT || node >= MOST_NODES ? -1 : node;
}

static void pace(int fd) {
    long bytes = number("COMMOPT_PACE_BYTES");
    unsigned long rate = (unsigned long)bytes;
    if (bytes > 0) setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
}

int bind(int fd, const struct sockaddr *address, socklen_t length) {
    static int (*next)(int, const struct sockaddr *, socklen_t);
    static unsigned taken;
    long node = own_node();
    struct sockaddr_storage chosen = {0};
    if (!next) next = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "bind");
    if (node < 0 || length > sizeof chosen || port_of(fd, address) != 0) return next(fd, address, length);
    __builtin_memcpy(&chosen, address, length);
    for (int tries = 0; tries < PORTS_PER_NODE; tries++) {
        unsigned place = ((unsigned)getpid() * 37u + __sync_fetch_and_add(&taken, 1)) % PORTS_PER_NODE;
        ((struct sockaddr_in *)&chosen)->sin_port = htons((unsigned short)(FIRST_PORT + node * PORTS_PER_NODE + place));
        if (next(fd, (struct sockaddr *)&chosen, length) == 0) return 0;
        if (errno != EADDRINUSE) return -1;
    }
    return next(fd, address, length);
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    static int (*next)(int, const struct sockaddr *, socklen_t);
    long mine = own_node(), theirs = node_of(port_of(fd, address));
    if (!next) next = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "connect");
    if (mine >= 0 && theirs >= 0 && mine != theirs) pace(fd);
    return next(fd, address, length);
}

static int accepted(int fd) {
    struct sockaddr_storage here = {0};
    socklen_t length = sizeof here;
    if (fd >= 0 && own_node() >= 0 && getsockname(fd, (struct sockaddr *)&here, &length) == 0 &&
        node_of(port_of(fd, (struct sockaddr *)&here)) == own_node())
        pace(fd);
    return fd;
}

int accept(int fd, struct sockaddr *address, socklen_t *length) {
    static int (*next)(int, struct sockaddr *, socklen_t *);
    if (!next) next = (int (*)(int, struct sockaddr *, socklen_t *))dlsym(RTLD_NEXT, "accept");
    return accepted(next(fd, address, length));
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
    static int (*next)(int, struct sockaddr *, socklen_t *, int);
    if (!next) next = (int (*)(int, struct sockaddr *, socklen_t *, int))dlsym(RTLD_NEXT, "accept4");
    return accepted(next(fd, address, length, flags));
}

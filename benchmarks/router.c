/* A user-space router for the benchmark's emulated links, since not every kernel has the netem queue discipline.
 *
 *   router NAME:MBIT_UP:MBIT_DOWN ...      DELAY_US: one-way delay; QUEUE_MS: how long a packet may wait for a link
 *
 * Opens one TUN device per argument and says "ready"; whoever started it moves the devices into network namespaces
 * and gives the i-th (from 1) the address 10.83.0.i. A packet is sent through the sender's uplink, takes DELAY_US, and
 * goes through the receiver's downlink; both serialise at their rate, and drop what would wait longer than QUEUE_MS.
 * Packets may be segments of up to 64 KiB (TCP segmentation offload): rates count their bytes, so only the number of
 * packets differs from that of a wire. Ends when its standard input does.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { PORTS = 17, VNET_HEADER = 10, LARGEST = 65535 + VNET_HEADER, BURST = 32 };

struct packet {
    int64_t due;    /* ns: when its present stage ends */
    uint64_t order; /* equal times keep the order of arrival */
    int to, size, at_receiver;
    unsigned char data[LARGEST];
};

struct port {
    int fd;
    double up, down; /* bytes per ns; 0: no limit */
    int64_t up_free, down_free;
};

static struct port ports[PORTS];
static int count;
static int64_t delay, patience;
static struct packet **heap, **spare;
static size_t used, space, spares, spare_space;
static uint64_t arrivals;

static int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int before(const struct packet *a, const struct packet *b) {
    return a->due < b->due || (a->due == b->due && a->order < b->order);
}

static void *grown(void *list, size_t *size) {
    *size = *size ? *size * 2 : 256;
    list = realloc(list, *size * sizeof(struct packet *));
    if (!list) exit(1);
    return list;
}

static void push(struct packet *item) {
    if (used == space) heap = grown(heap, &space);
    size_t hole = used++;
    while (hole && before(item, heap[(hole - 1) / 2])) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = item;
}

static struct packet *pop(void) {
    struct packet *first = heap[0], *last = heap[--used];
    size_t hole = 0, child;
    while ((child = 2 * hole + 1) < used) {
        if (child + 1 < used && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], last)) break;
        heap[hole] = heap[child];
        hole = child;
    }
    heap[hole] = last;
    return first;
}

static struct packet *fresh(void) {
    struct packet *item = spares ? spare[--spares] : malloc(sizeof *item);
    if (!item) exit(1);
    return item;
}

static void drop(struct packet *item) {
    if (spares == spare_space) spare = grown(spare, &spare_space);
    spare[spares++] = item;
}

/* Sends an item through a link at `rate` that is busy until *free_at; 0 if its queue is too long. */
static int through(struct packet *item, double rate, int64_t *free_at, int64_t now) {
    int64_t start = *free_at > now ? *free_at : now;
    if (rate > 0 && start - now > patience) return 0;
    item->due = rate > 0 ? start + (int64_t)((item->size - VNET_HEADER) / rate) : now;
    if (rate > 0) *free_at = item->due;
    return 1;
}

static void receive(int from) {
    for (int i = 0; i < BURST; i++) {
        struct packet *item = fresh();
        item->size = (int)read(ports[from].fd, item->data, LARGEST);
        if (item->size <= 0) {
            drop(item);
            return;
        }
        const unsigned char *ip = item->data + VNET_HEADER;
        int is_ipv4 = item->size >= VNET_HEADER + 20 && ip[0] >> 4 == 4;
        item->to = is_ipv4 ? ip[19] - 1 : -1;
        if (item->to < 0 || item->to >= count || item->to == from
            || !through(item, ports[from].up, &ports[from].up_free, clock_ns())) {
            drop(item);
            continue;
        }
        item->due += delay;
        item->order = arrivals++;
        item->at_receiver = 0;
        push(item);
    }
}

static void move_what_is_due(void) {
    while (used && heap[0]->due <= clock_ns()) {
        struct packet *item = pop();
        struct port *to = &ports[item->to];
        if (item->at_receiver) {
            if (write(to->fd, item->data, item->size) < 0) { /* the device's queue is full: lost, as on a wire */
            }
            drop(item);
        } else if (through(item, to->down, &to->down_free, item->due)) {
            item->at_receiver = 1;
            push(item);
        } else {
            drop(item);
        }
    }
}

static int open_device(const char *name) {
    struct ifreq request;
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) < 0 || ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) {
        perror("/dev/net/tun");
        exit(1);
    }
    return fd;
}

static int64_t from_environment(const char *name) {
    const char *text = getenv(name);
    return text ? atoll(text) : 0;
}

int main(int argc, char **argv) {
    delay = from_environment("DELAY_US") * 1000;
    patience = from_environment("QUEUE_MS") * 1000000;
    for (count = 0; count < argc - 1 && count < PORTS - 1; count++) {
        char name[16];
        double up, down;
        if (sscanf(argv[count + 1], "%15[^:]:%lf:%lf", name, &up, &down) != 3) return 2;
        ports[count] = (struct port){open_device(name), up / 8000, down / 8000, 0, 0};
    }
    prctl(PR_SET_TIMERSLACK, 1000UL); /* ns */
    puts("ready");
    fflush(stdout);
    struct pollfd waits[PORTS];
    for (int i = 0; i < count; i++) waits[i] = (struct pollfd){ports[i].fd, POLLIN, 0};
    waits[count] = (struct pollfd){0, POLLIN, 0};
    for (;;) {
        move_what_is_due();
        int64_t left = used ? heap[0]->due - clock_ns() : INT64_C(1000000000);
        if (left < 0) left = 0;
        struct timespec timeout = {left / 1000000000, left % 1000000000};
        if (ppoll(waits, count + 1, &timeout, NULL) < 0) return 1;
        char byte;
        if (waits[count].revents && read(0, &byte, 1) <= 0) return 0;
        for (int i = 0; i < count; i++)
            if (waits[i].revents & POLLIN) receive(i);
    }
}

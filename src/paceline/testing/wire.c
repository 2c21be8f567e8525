/* Carries Ethernet frames between hosts (network namespaces) over slow links, as `tc netem` would
 * where the kernel has it.
 *
 *     wire DELAY RATE LOSS QUEUE MTU NAMESPACE...
 *
 * Each host gets a TAP device eth0, the end of its own link to a switch, which is this program. A
 * frame waits until those before it have left, takes size / RATE seconds to leave, arrives DELAY
 * seconds later, and then does the same on the link of the receiver. One that finds more than
 * QUEUE bytes before it is dropped, and so is each with probability LOSS.
 *
 * RATE is in bits per second, or inf. Commands come on stdin; each is answered by a line on stdout:
 *
 *     delay|rate|loss|up HOST VALUE      ok
 *     stat                               six numbers per host: bytes and frames carried and frames
 *                                        dropped, first those out of the host, then those into it
 *
 * It ends when stdin does, so it never outlives whoever started it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_HOSTS = 60,
    HEADER = 18,             /* Ethernet: two addresses, type, and a VLAN tag if there is one */
    BURST = 64,              /* frames read of one host before the others have their turn */
    MAX_MEMORY = 512 << 20,  /* bytes of frames: a fast long link may hold many */
};

/* Frames are looked after at most once in TICK seconds, because a wake-up costs more than a frame.
 * What is due within half of it goes now, so that on average nobody is late. */
static const double TICK = 200e-6;

struct frame {
    struct frame *next;
    double sent; /* when its last bit has left */
    int size;
    unsigned char data[];
};

/* One direction of a link. */
struct line {
    struct frame *first, *last;
    double free_at; /* when the last bit of the last frame has left */
    long bytes, frames, dropped;
};

struct host {
    int tap;
    double delay, rate, loss; /* seconds, bytes per second, probability */
    bool up;
    struct line out, in;
};

static struct host hosts[MAX_HOSTS];
static int host_count;
static double queue_limit;
static int frame_size;
static struct frame *spare; /* frames to use again, since malloc for each one shows in a profile */
static int spare_left;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static struct timespec timespec_of(double seconds) {
    return (struct timespec){(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
}

/* ---- frames ---- */

static struct frame *take_frame(void) {
    struct frame *frame = spare;
    if (frame) {
        spare = frame->next;
    } else if (spare_left > 0) {
        spare_left--;
        frame = malloc(sizeof *frame + frame_size);
        if (!frame) fail("malloc");
    }
    return frame;
}

static void give_back(struct frame *frame) {
    frame->next = spare;
    spare = frame;
}

/* ---- lines ---- */

static void append(struct line *line, struct frame *frame) {
    frame->next = NULL;
    if (line->first)
        line->last->next = frame;
    else
        line->first = frame;
    line->last = frame;
}

static struct frame *remove_first(struct line *line) {
    struct frame *frame = line->first;
    line->first = frame->next;
    return frame;
}

static void drop(struct line *line, struct frame *frame) {
    line->dropped++;
    give_back(frame);
}

/* Put a frame that arrives at `time` on the line, or drop it. */
static void transmit(struct host *host, struct line *line, struct frame *frame, double time) {
    double waiting = isinf(host->rate) ? 0 : fmax(0, line->free_at - time) * host->rate;
    if (!host->up || waiting > queue_limit || (host->loss > 0 && drand48() < host->loss)) {
        drop(line, frame);
        return;
    }
    line->free_at = fmax(line->free_at, time) + frame->size / host->rate;
    frame->sent = line->free_at;
    append(line, frame);
}

/* Return the first frame if it has come through by `time`, counted as carried. */
static struct frame *arrived(struct host *host, struct line *line, double time) {
    if (!line->first || line->first->sent + host->delay > time) return NULL;
    struct frame *frame = remove_first(line);
    line->bytes += frame->size;
    line->frames++;
    return frame;
}

/* Let what has not left yet take `ratio` times as long, or a link would stay slow for a while. */
static void rescale(struct line *line, double ratio, double time) {
    for (struct frame *frame = line->first; frame; frame = frame->next)
        if (frame->sent > time) frame->sent = time + (frame->sent - time) * ratio;
    if (line->free_at > time) line->free_at = time + (line->free_at - time) * ratio;
}

static void empty(struct line *line) {
    while (line->first) drop(line, remove_first(line));
    line->free_at = 0;
}

/* ---- the switch: the address of a host ends in its number, so there is nothing to learn ---- */

static void address_of(int host, unsigned char address[6]) {
    const unsigned char made_up[6] = {2, 0, 0, 0, 0, (unsigned char)(host + 1)};
    memcpy(address, made_up, 6);
}

static void flood(int from, const struct frame *frame, double time) {
    for (int to = 0; to < host_count; to++) {
        struct frame *copy = to == from ? NULL : take_frame();
        if (!copy) continue;
        copy->size = frame->size;
        memcpy(copy->data, frame->data, frame->size);
        transmit(&hosts[to], &hosts[to].in, copy, time);
    }
}

static void pass_on(int from, struct frame *frame, double time) {
    unsigned char address[6];
    int to = frame->data[5] - 1;
    if (frame->data[0] & 1) {
        flood(from, frame, time);
        give_back(frame);
        return;
    }
    address_of(to, address);
    if (to >= 0 && to < host_count && to != from && !memcmp(address, frame->data, 6))
        transmit(&hosts[to], &hosts[to].in, frame, time);
    else
        give_back(frame);
}

/* ---- moving frames ---- */

static void read_frames(struct host *host, double time) {
    for (int i = 0; i < BURST; i++) {
        struct frame *frame = take_frame();
        if (!frame) return; /* the device's own queue is then the one that drops */
        frame->size = read(host->tap, frame->data, frame_size);
        if (frame->size < 14) {
            give_back(frame);
            return;
        }
        transmit(host, &host->out, frame, time);
    }
}

/* A frame reaches the next link when it should have, not when this program came to it: lateness
 * must not add up. */
static void move_frames(double time) {
    struct frame *frame;
    for (int i = 0; i < host_count; i++)
        while ((frame = arrived(&hosts[i], &hosts[i].out, time)))
            pass_on(i, frame, frame->sent + hosts[i].delay);
    for (int i = 0; i < host_count; i++)
        while ((frame = arrived(&hosts[i], &hosts[i].in, time))) {
            /* A device that is not up takes nothing: the frame is lost, as on a real one. */
            ssize_t written = write(hosts[i].tap, frame->data, frame->size);
            (void)written;
            give_back(frame);
        }
}

static double next_arrival(void) {
    double next = INFINITY;
    for (int i = 0; i < host_count; i++) {
        struct host *host = &hosts[i];
        if (host->out.first) next = fmin(next, host->out.first->sent + host->delay);
        if (host->in.first) next = fmin(next, host->in.first->sent + host->delay);
    }
    return next;
}

/* ---- commands ---- */

static void set_rate(struct host *host, double rate) {
    double time = now();
    if (!isinf(host->rate)) { /* else nothing waits */
        rescale(&host->out, host->rate / rate, time);
        rescale(&host->in, host->rate / rate, time);
    }
    host->rate = rate;
}

static void set_state(struct host *host, bool up) {
    host->up = up;
    if (!up) {
        empty(&host->out);
        empty(&host->in);
    }
}

static bool change(struct host *host, const char *what, double value) {
    if (!strcmp(what, "delay"))
        host->delay = value;
    else if (!strcmp(what, "loss"))
        host->loss = value;
    else if (!strcmp(what, "rate"))
        set_rate(host, value / 8);
    else if (!strcmp(what, "up"))
        set_state(host, value != 0);
    else
        return false;
    return true;
}

static void print_line(const struct line *line) {
    printf("%ld %ld %ld ", line->bytes, line->frames, line->dropped);
}

static void obey(const char *command) {
    char what[16];
    int host;
    double value;
    if (!strcmp(command, "stat\n")) {
        for (int i = 0; i < host_count; i++) {
            print_line(&hosts[i].out);
            print_line(&hosts[i].in);
        }
        puts("");
    } else if (sscanf(command, "%15s %d %lf", what, &host, &value) == 3 && host >= 0 &&
               host < host_count && change(&hosts[host], what, value)) {
        puts("ok");
    } else {
        printf("not understood: %s", command);
    }
}

/* Whoever asks waits for the answer, so there is one command at a time. */
static void read_command(void) {
    char command[128];
    ssize_t size = read(STDIN_FILENO, command, sizeof command - 1);
    if (size <= 0) exit(0);
    command[size] = 0;
    obey(command);
    fflush(stdout);
}

/* ---- the start ---- */

static void enter(const char *namespace) {
    int file = open(namespace, O_RDONLY | O_CLOEXEC);
    if (file < 0 || setns(file, CLONE_NEWNET)) fail(namespace);
    close(file);
}

static int open_tap(int host) {
    struct ifreq request = {.ifr_name = "eth0", .ifr_flags = IFF_TAP | IFF_NO_PI};
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tap < 0 || ioctl(tap, TUNSETIFF, &request)) fail("/dev/net/tun");
    request.ifr_hwaddr.sa_family = 1; /* ARPHRD_ETHER */
    address_of(host, (unsigned char *)request.ifr_hwaddr.sa_data);
    if (ioctl(tap, SIOCSIFHWADDR, &request)) fail("SIOCSIFHWADDR");
    return tap;
}

static void make_hosts(char **arguments, int count) {
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    queue_limit = atof(arguments[3]);
    frame_size = atoi(arguments[4]) + HEADER;
    spare_left = MAX_MEMORY / frame_size;
    host_count = count;
    for (int i = 0; i < count; i++) {
        char path[256];
        snprintf(path, sizeof path, "/var/run/netns/%s", arguments[5 + i]);
        enter(path);
        hosts[i] = (struct host){
            .tap = open_tap(i),
            .delay = atof(arguments[0]),
            .rate = atof(arguments[1]) / 8,
            .loss = atof(arguments[2]),
            .up = true,
        };
    }
    /* Back, or this program would count as one that runs on the last host. */
    if (home < 0 || setns(home, CLONE_NEWNET)) fail("/proc/self/ns/net");
    close(home);
}

/* A cable does not wait for a processor. Without the right to this, it is only less exact. */
static void be_prompt(void) {
    struct sched_param priority = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_RR, &priority);
    prctl(PR_SET_TIMERSLACK, 1);
}

/* Move frames, then wait for what is to be moved, read or obeyed next. */
static void turn(struct pollfd *polled) {
    static double last;
    double time = now();
    if (time < last + TICK) {
        struct timespec until = timespec_of(last + TICK);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        time = now();
    }
    last = time;
    move_frames(time + TICK / 2);
    struct timespec wait = timespec_of(fmax(0, fmin(next_arrival() - TICK / 2 - now(), 3600)));
    if (ppoll(polled, host_count + 1, &wait, NULL) <= 0) return;
    time = now();
    for (int i = 0; i < host_count; i++)
        if (polled[i].revents) read_frames(&hosts[i], time);
    if (polled[host_count].revents) read_command();
}

int main(int count, char **arguments) {
    struct pollfd polled[MAX_HOSTS + 1];
    if (count < 7 || count - 6 > MAX_HOSTS) {
        fprintf(stderr, "usage: wire DELAY RATE LOSS QUEUE MTU NAMESPACE...\n");
        return 2;
    }
    make_hosts(arguments + 1, count - 6);
    be_prompt();
    for (int i = 0; i < host_count; i++)
        polled[i] = (struct pollfd){.fd = hosts[i].tap, .events = POLLIN};
    polled[host_count] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    for (;;) turn(polled);
}

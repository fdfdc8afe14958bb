/* Threads of the OpenMP runtime that torch has loaded, called through its functions, so that there is no second pool
 * and no runtime is linked. Without the runtime, one thread computes. */
#pragma once

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
static parallel_function gomp_parallel;
static int (*thread_number)(void), (*team_size)(void);
static void (*gomp_barrier)(void);

typedef struct {
    int index, size;
} Team;

INLINE void team_barrier(Team team) {
    if (team.size > 1) gomp_barrier();
}

/* This thread's range [first, last) of `count` items: equal consecutive shares. */
INLINE void thread_range(Team team, long count, long *first, long *last) {
    *first = count * team.index / team.size;
    *last = count * (team.index + 1) / team.size;
}

/* Claim the next unit of `count`; returns -1 if none is left. */
INLINE long claim_unit(long *taken, long count) {
    long unit = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    return unit < count ? unit : -1;
}

static void run_team(void (*work)(void *), void *data, long threads) {
    if (threads > 1 && gomp_parallel)
        gomp_parallel(work, data, (unsigned)threads, 0);
    else
        work(data);
}

/* The runtime may start fewer threads than requested. */
INLINE Team join_team(long threads) {
    return threads > 1 && gomp_parallel ? (Team){thread_number(), team_size()} : (Team){0, 1};
}

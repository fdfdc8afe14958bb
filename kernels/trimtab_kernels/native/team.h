/* Threads of the OpenMP runtime that torch has loaded, called through its functions, so that there is no second pool
 * and no runtime is linked. Without the runtime, one thread computes.
 *
 * The threads share stages of work: numbered units that any thread may compute. Nothing waits for a thread, only for
 * units. A core that other programs use keeps a thread from running for milliseconds, in the middle of a unit; so a
 * thread that finds no other work computes the missing units again:
 *
 *     take a unit | compute it into own memory | win_unit: the first one may store it | finish_unit
 *
 * A thread that is late computes from data that others may have overwritten since. It then loses the unit, because a
 * later stage begins only when all units of the former are won: nothing of such a result is stored. */
#pragma once

#include <sched.h>
#include <time.h>

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
static parallel_function gomp_parallel;
static int (*thread_number)(void), (*team_size)(void);

/* State of a unit: when it was last taken, won and stored, as 3 * stage + one of these. Shared by a call's threads. */
enum unit_state { TAKEN, WON, STORED };

/* One thread's place. All threads begin the same stages in the same order. */
typedef struct {
    int index, size;
    uint32_t *units; /* states, zero before the first stage */
    uint32_t stage;
} Team;

typedef struct {
    Team *team;
    long count, first, last; /* units; the rest of a thread's part */
    int part, can_repeat;    /* the part of thread (index + part) % size */
    long num_stored;         /* units from 0 on that are known to be stored */
    long num_taken;
    int64_t began, patience; /* in ns; patience: how long to wait for others before their units are repeated */
} Stage;

#define LEAST_PATIENCE 5000 /* ns */
#define SPIN_TIME 50000     /* ns of waiting before other threads may use this core */

INLINE int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Set [first, last) to the part of thread (index + part) % size: equal consecutive shares of the units. */
INLINE void open_part(Stage *stage) {
    long size = stage->team->size, index = (stage->team->index + stage->part) % size;
    stage->first = stage->count * index / size;
    stage->last = stage->count * (index + 1) / size;
}

/* Begin the next stage. `can_repeat`: computing a unit changes nothing before win_unit(). */
INLINE Stage begin_stage(Team *team, long count, int can_repeat) {
    Stage made = {.team = team, .count = count, .can_repeat = can_repeat};
    team->stage++;
    open_part(&made);
    if (team->size > 1) made.began = now_ns();
    return made;
}

INLINE int change_unit(const Team *team, long unit, uint32_t before, uint32_t after) {
    return __atomic_compare_exchange_n(team->units + unit, &before, after, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/* Take a unit that no thread has taken in this stage. */
INLINE int take_unit(const Team *team, long unit) {
    uint32_t before = __atomic_load_n(team->units + unit, __ATOMIC_RELAXED), mark = 3 * team->stage + TAKEN;
    return before < mark && change_unit(team, unit, before, mark);
}

/* Return true for the first thread that has computed the unit, which then stores it. */
INLINE int win_unit(const Team *team, long unit) {
    uint32_t mark = 3 * team->stage;
    return team->size == 1 || change_unit(team, unit, mark + TAKEN, mark + WON);
}

/* The unit is stored. */
INLINE void finish_unit(const Team *team, long unit) {
    if (team->size > 1) __atomic_store_n(team->units + unit, 3 * team->stage + STORED, __ATOMIC_RELEASE);
}

INLINE int is_finished(Stage *stage) {
    const Team *team = stage->team;
    uint32_t mark = 3 * team->stage + STORED;
    while (stage->num_stored < stage->count &&
           __atomic_load_n(team->units + stage->num_stored, __ATOMIC_ACQUIRE) >= mark)
        stage->num_stored++;
    return stage->num_stored == stage->count;
}

/* Wait until the stage is finished (returns -1), or for a unit that takes another thread too long. */
static long missing_unit(Stage *stage) {
    const Team *team = stage->team;
    if (is_finished(stage)) return -1;
    int64_t began = now_ns();
    if (!stage->patience) {
        stage->patience = stage->num_taken ? (began - stage->began) / stage->num_taken : 0;
        if (stage->patience < LEAST_PATIENCE) stage->patience = LEAST_PATIENCE;
    }
    while (!is_finished(stage)) {
        int64_t waited = now_ns() - began;
        if (stage->can_repeat && waited > stage->patience)
            for (long unit = stage->num_stored; unit < stage->count; unit++)
                if (__atomic_load_n(team->units + unit, __ATOMIC_RELAXED) == 3 * team->stage + TAKEN) return unit;
        if (waited > SPIN_TIME) sched_yield();
    }
    return -1;
}

/* Return the next unit for this thread, or -1 when the stage is finished. First its own part, forwards, then other
 * threads' parts from their ends, then what others have taken and not won. */
INLINE long next_unit(Stage *stage) {
    const Team *team = stage->team;
    if (team->size == 1) return stage->first < stage->last ? stage->first++ : -1;
    while (1) {
        while (stage->first < stage->last) {
            long unit = stage->part ? --stage->last : stage->first++;
            if (take_unit(team, unit)) {
                stage->num_taken++;
                return unit;
            }
        }
        if (stage->part == team->size - 1) return missing_unit(stage);
        stage->part++;
        open_part(stage);
    }
}

static void run_team(void (*work)(void *), void *data, long threads) {
    if (threads > 1 && gomp_parallel)
        gomp_parallel(work, data, (unsigned)threads, 0);
    else
        work(data);
}

/* The runtime may start fewer threads than requested. */
INLINE Team join_team(long threads, uint32_t *units) {
    int is_alone = threads < 2 || !gomp_parallel;
    return (Team){is_alone ? 0 : thread_number(), is_alone ? 1 : team_size(), units, 0};
}

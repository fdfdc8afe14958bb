/* Operations on single rows: RMS norm, and the rotation of q and k heads. */
#pragma once

INLINE float inverse_rms(const float *x, long size, float eps) {
    vec sum[2] = {{0}};
    long i = 0;
    float rest = 0.0f;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH)
        for (int u = 0; u < 2; u++) {
            vec v = load(x + i + u * WIDTH);
            sum[u] += v * v;
        }
    for (; i < size; i++) rest += x[i] * x[i];
    return 1.0f / __builtin_sqrtf((sum_of(sum[0] + sum[1]) + rest) / (float)size + eps);
}

/* y = x / rms(x) * weight; y may be x. */
static void normalise(const float *x, const float *weight, long size, float eps, float *y) {
    float scale = inverse_rms(x, size, eps);
    for (long i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

/* Rotate adjacent pairs of x in place by rotation [size / 2] (cos, sin). */
static void rotate(float *x, const float *restrict rotation, long size) {
    for (long i = 0; i < size; i += 2) {
        float even = x[i], odd = x[i + 1], cosine = rotation[i], sine = rotation[i + 1];
        x[i] = even * cosine - odd * sine;
        x[i + 1] = odd * cosine + even * sine;
    }
}

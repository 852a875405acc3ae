/* Langevin dynamics of several copies of one small molecule at once, one copy in each lane of a vector.

       U = bonds + angles + torsions + Lennard-Jones + Coulomb + generalised Born (OBC) + surface

   A vector `V` holds the same coordinate of every copy, so the formulas below read as those of a single molecule, and
   no copy waits for another. Units are OpenMM's: nm, ps, kJ/mol, atomic masses. Compiled by lanes.py. */

#include <math.h>
#include <stdint.h>

/* float32 in a register of this machine. Of wider vectors the compiler keeps every intermediate in memory: sixteen
   lanes in registers of eight take 2.7 times as long. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

const int32_t width = LANES;

typedef float V __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t I __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t U __attribute__((vector_size(4 * LANES), aligned(4)));

/* Pairs are (0, 1), (0, 2), ..., (n - 2, n - 1). Table rows are in the order of lanes.py. */
typedef struct {
    int32_t n_atoms, n_bonds, n_angles, n_torsions, n_constraints;
    const int32_t *bond, *angle, *torsion, *constraint;                      /* atoms: 2, 3, 4, 2 a row */
    const float *bond_table, *angle_table, *torsion_table, *constraint_table; /* (r0, k), (theta0, k), c0..c6, d */
    const float *pair_table;                                                 /* q q / 4 pi eps, 4 e s^12, 4 e s^6, GB */
    const float *born_table;  /* an atom: radius less offset, scaled radius, radius, own GB energy, surface energy */
    const float *mass;
} Molecule;

typedef struct { V x, y, z; } P;

static inline V splat(float a) { return a - (V){}; }
static inline V choose(I mask, V a, V b) { return (V)((mask & (I)a) | (~mask & (I)b)); }
static inline V larger(V a, V b) { return choose(a > b, a, b); }
static inline V magnitude(V a) { return (V)((I)a & 0x7fffffff); }
static inline V root(V a) {
    V out;
    for (int l = 0; l < LANES; l++) out[l] = sqrtf(a[l]);
    return out;
}
static inline V floats(I a) { return __builtin_convertvector(a, V); }

static inline P minus(P a, P b) { return (P){a.x - b.x, a.y - b.y, a.z - b.z}; }
static inline V dot(P a, P b) { return a.x * b.x + a.y * b.y + a.z * b.z; }
static inline P times(P a, V s) { return (P){a.x * s, a.y * s, a.z * s}; }
static inline P cross(P a, P b) {
    return (P){a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}
static inline void add(P *a, P b, V s) { a->x += b.x * s; a->y += b.y * s; a->z += b.z * s; }

/* exp: 2^k e^r with |r| <= log(2) / 2 and the Taylor series of e^r to r^7. */
static inline V exponential(V a) {
    a = larger(a, splat(-87.0f));
    V k = floats(__builtin_convertvector(a * 1.44269504f + choose(a < 0.0f, splat(-0.5f), splat(0.5f)), I));
    V r = a - k * 0.693359375f + k * 2.12194440e-4f;
    V e = 1.0f + r * (1.0f + r * (0.5f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f + r / 5040.0f))))));
    return (V)((I)e + (__builtin_convertvector(k, I) << 23));
}

/* log: a = 2^k m with m within a factor sqrt(2) of 1, and log m = 2 atanh((m - 1) / (m + 1)). */
static inline V logarithm(V a) {
    I bits = (I)a - 0x3f3504f3, k = bits >> 23;
    V m = (V)((bits & 0x7fffff) + 0x3f3504f3);
    V z = (m - 1.0f) / (m + 1.0f), q = z * z;
    V series = 2.0f + q * (2 / 3.0f + q * (2 / 5.0f + q * (2 / 7.0f + q * (2 / 9.0f))));
    return floats(k) * 0.693359375f + (z * series - floats(k) * 2.12194440e-4f);
}

/* acos: sqrt(1 - |a|) times a polynomial (Abramowitz and Stegun 4.4.46), off by 2e-8. */
static inline V arccosine(V a) {
    V m = magnitude(a);
    V p = 1.5707963050f + m * (-0.2145988016f + m * (0.0889789874f + m * (-0.0501743046f + m * (0.0308918810f
        + m * (-0.0170881256f + m * (0.0066700901f + m * -0.0012624911f))))));
    V positive = root(1.0f - m) * p;
    return choose(a < 0.0f, 3.14159265f - positive, positive);
}

/* What j takes from the Born integral of i, and its derivative by their distance. rho is the offset radius of i. */
static inline V descreen(V r, V inverse, float rho, float scaled, V *slope) {
    V far = r + scaled, near = larger(magnitude(r - scaled), splat(rho));
    V l = 1.0f / near, u = 1.0f / far, l2 = l * l, u2 = u * u, ratio = logarithm(near * u);
    V term = l - u + 0.25f * (r - scaled * scaled * inverse) * (u2 - l2) + 0.5f * inverse * ratio;
    term += choose(rho < scaled - r, 2.0f * (1.0f / rho - l), splat(0.0f));
    V inside = 0.25f * (1.0f + scaled * scaled * inverse * inverse) * (u2 - l2) - 0.5f * ratio * inverse * inverse;
    I touched = rho < far;
    *slope = choose(touched, 0.5f * rho * inside, splat(0.0f));
    return choose(touched, 0.5f * rho * term, splat(0.0f));
}

static V bonded(const Molecule *m, const P *x, P *f) {
    V energy = splat(0.0f);
    for (int b = 0; b < m->n_bonds; b++) {
        const int32_t *at = m->bond + 2 * b;
        P d = minus(x[at[0]], x[at[1]]);
        V r = root(dot(d, d)), off = r - m->bond_table[2 * b];
        float k = m->bond_table[2 * b + 1];
        energy += 0.5f * k * off * off;
        V push = -k * off / r;
        add(f + at[0], d, push);
        add(f + at[1], d, -push);
    }
    for (int a = 0; a < m->n_angles; a++) {
        const int32_t *at = m->angle + 3 * a;
        P p = minus(x[at[0]], x[at[1]]), q = minus(x[at[2]], x[at[1]]);
        V pp = 1.0f / dot(p, p), qq = 1.0f / dot(q, q), pq = root(pp * qq), c = dot(p, q) * pq;
        c = larger(choose(c > 0.9999f, splat(0.9999f), c), splat(-0.9999f));
        V off = arccosine(c) - m->angle_table[2 * a];
        float k = m->angle_table[2 * a + 1];
        energy += 0.5f * k * off * off;
        V push = k * off / root(1.0f - c * c);  /* -dU/dcos */
        P first = times(q, pq), second = times(p, pq);
        add(&first, p, -c * pp);
        add(&second, q, -c * qq);
        add(f + at[0], first, push);
        add(f + at[2], second, push);
        add(f + at[1], first, -push);
        add(f + at[1], second, -push);
    }
    for (int t = 0; t < m->n_torsions; t++) {
        const int32_t *at = m->torsion + 4 * t;
        const float *table = m->torsion_table + 7 * t;
        P b1 = minus(x[at[1]], x[at[0]]), b2 = minus(x[at[2]], x[at[1]]), b3 = minus(x[at[3]], x[at[2]]);
        P left = cross(b1, b2), right = cross(b2, b3);
        V ll = 1.0f / dot(left, left), rr = 1.0f / dot(right, right), lr = root(ll * rr), c = dot(left, right) * lr;
        /* cos(n phi) is the Chebyshev polynomial T_n of c, and its slope n U_(n-1): no angle, and no singularity. */
        V now = c, before = splat(1.0f), slope = splat(1.0f), slope_before = splat(0.0f), push = splat(0.0f);
        energy += table[0];
        for (int n = 1; n <= 6; n++) {
            energy += table[n] * now;
            push -= table[n] * n * slope;
            V next = 2.0f * c * now - before, slope_next = 2.0f * c * slope - slope_before;
            before = now; now = next;
            slope_before = slope; slope = slope_next;
        }
        P by_left = times(right, lr), by_right = times(left, lr);
        add(&by_left, left, -c * ll);
        add(&by_right, right, -c * rr);
        by_left = times(by_left, push);
        by_right = times(by_right, push);
        P f1 = cross(b2, by_left), f3 = cross(by_right, b2), f2 = cross(by_left, b1), more = cross(b3, by_right);
        add(&f2, more, splat(1.0f));
        add(f + at[0], f1, splat(-1.0f));
        add(f + at[1], f1, splat(1.0f));
        add(f + at[1], f2, splat(-1.0f));
        add(f + at[2], f2, splat(1.0f));
        add(f + at[2], f3, splat(-1.0f));
        add(f + at[3], f3, splat(1.0f));
    }
    return energy;
}

static V nonbonded(const Molecule *m, const P *x, P *f) {
    int n = m->n_atoms, n_pairs = n * (n - 1) / 2;
    V r[n_pairs], pull[n_pairs], slope[n_pairs][2], sum[n], born[n], chain[n], by_born[n], energy = splat(0.0f);
    const float *table = m->born_table;
    for (int i = 0; i < n; i++) sum[i] = splat(0.0f);
    for (int i = 0, p = 0; i < n; i++)
        for (int j = i + 1; j < n; j++, p++) {
            P d = minus(x[i], x[j]);
            r[p] = root(dot(d, d));
            V inverse = 1.0f / r[p];
            sum[i] += descreen(r[p], inverse, table[5 * i], table[5 * j + 1], &slope[p][0]);
            sum[j] += descreen(r[p], inverse, table[5 * j], table[5 * i + 1], &slope[p][1]);
        }
    for (int i = 0; i < n; i++, table += 5) {  /* OBC2: alpha 1, beta 0.8, gamma 4.85 */
        V s = sum[i], e = exponential(-2.0f * s * (1.0f - s * (0.8f - 4.85f * s))), tanh = (1.0f - e) / (1.0f + e);
        born[i] = 1.0f / (1.0f / table[0] - tanh / table[2]);
        chain[i] = born[i] * born[i] * (1.0f - tanh * tanh) * (1.0f - s * (1.6f - 14.55f * s)) / table[2];
        V inverse = 1.0f / born[i], own = table[3] * inverse, ratio = table[2] * inverse;
        V surface = table[4] * ratio * ratio * ratio * ratio * ratio * ratio;
        energy += own + surface;
        by_born[i] = -(own + 6.0f * surface) * inverse;
    }
    for (int i = 0, p = 0; i < n; i++)
        for (int j = i + 1; j < n; j++, p++) {
            const float *pair = m->pair_table + 4 * p;
            V inverse = 1.0f / r[p], i2 = inverse * inverse, i6 = i2 * i2 * i2, r2 = r[p] * r[p];
            V coulomb = pair[0] * inverse, twelve = pair[1] * i6 * i6, six = pair[2] * i6;
            V product = born[i] * born[j], d = 0.25f * r2 / product, e = exponential(-d);
            V square = 1.0f / (r2 + product * e), solvent = pair[3] * root(square);
            energy += coulomb + twelve - six + solvent;
            V common = -0.5f * solvent * square, by_product = common * e * (1.0f + d);
            by_born[i] += by_product * born[j];
            by_born[j] += by_product * born[i];
            pull[p] = -i2 * (coulomb + 12.0f * twelve - 6.0f * six) + common * (2.0f - 0.5f * e);
        }
    for (int i = 0; i < n; i++) by_born[i] *= chain[i];
    for (int i = 0, p = 0; i < n; i++)
        for (int j = i + 1; j < n; j++, p++) {
            V push = -(pull[p] + (by_born[i] * slope[p][0] + by_born[j] * slope[p][1]) / r[p]);
            P d = minus(x[i], x[j]);
            add(f + i, d, push);
            add(f + j, d, -push);
        }
    return energy;
}

static V force(const Molecule *m, const P *x, P *f) {
    for (int i = 0; i < m->n_atoms; i++) f[i] = (P){splat(0.0f), splat(0.0f), splat(0.0f)};
    V bonds = bonded(m, x, f);
    return bonds + nonbonded(m, x, f);
}

void energy_and_forces(const Molecule *m, const V *x, V *f, V *energy) {
    *energy = force(m, (const P *)x, (P *)f);
}

/* xoshiro128++ in every lane; (0, 1) from the upper 24 bits. */
static inline V uniform(U s[4]) {
    U t = s[0] + s[3], out = ((t << 7) | (t >> 25)) + s[0], shifted = s[1] << 9;
    s[2] ^= s[0]; s[3] ^= s[1]; s[1] ^= s[2]; s[0] ^= s[3]; s[2] ^= shifted;
    s[3] = (s[3] << 11) | (s[3] >> 21);
    return (floats((I)(out >> 8)) + 0.5f) * (1.0f / 16777216);
}

/* Two normals by Box and Muller; sine and cosine of half the angle, within a quarter turn, by Taylor series. */
static inline void normals(U state[4], V *a, V *b) {
    V length = root(-2.0f * logarithm(uniform(state))), h = 3.14159265f * (uniform(state) - 0.5f), q = h * h;
    V s = h * (1.0f - q * (1 / 6.0f - q * (1 / 120.0f - q * (1 / 5040.0f - q * (1 / 362880.0f - q / 39916800.0f)))));
    V c = 1.0f - q * (0.5f - q * (1 / 24.0f - q * (1 / 720.0f - q * (1 / 40320.0f - q * (1 / 3628800.0f - q / 479001600.0f)))));
    *a = length * (c * c - s * s);
    *b = length * 2.0f * s * c;
}

#define SWEEPS 6  /* A hydrogen is so light that a sweep leaves a thirtieth of the error of its neighbours. */

static void fix_velocities(const Molecule *m, const P *x, P *v) {
    for (int sweep = 0; sweep < SWEEPS; sweep++)
        for (int c = 0; c < m->n_constraints; c++) {
            int i = m->constraint[2 * c], j = m->constraint[2 * c + 1];
            float wi = 1 / m->mass[i], wj = 1 / m->mass[j];
            P d = minus(x[i], x[j]);
            V g = -dot(d, minus(v[i], v[j])) / ((wi + wj) * dot(d, d));
            add(v + i, d, g * wi);
            add(v + j, d, -g * wj);
        }
}

static void fix_positions(const Molecule *m, const P *before, P *x) {
    for (int sweep = 0; sweep < SWEEPS; sweep++)
        for (int c = 0; c < m->n_constraints; c++) {
            int i = m->constraint[2 * c], j = m->constraint[2 * c + 1];
            float wi = 1 / m->mass[i], wj = 1 / m->mass[j], length = m->constraint_table[c];
            P d = minus(x[i], x[j]), along = minus(before[i], before[j]);
            V g = (length * length - dot(d, d)) / (2.0f * (wi + wj) * dot(d, along));
            add(x + i, along, g * wi);
            add(x + j, along, -g * wj);
        }
}

/* n_steps of the Langevin-middle scheme: kick, half a drift, friction and noise, half a drift. */
void langevin(const Molecule *m, V *positions, V *velocities, V *energy, U *state, const V *thermal, int n_steps,
              float dt, float friction) {
    int n = m->n_atoms;
    P *x = (P *)positions, *v = (P *)velocities, f[n], before[n], free[n];
    float keep = expf(-friction * dt), fresh = sqrtf(1 - keep * keep);
    for (int step = 0; step < n_steps; step++) {
        force(m, x, f);
        for (int i = 0; i < n; i++) add(v + i, f[i], splat(dt / m->mass[i]));
        fix_velocities(m, x, v);
        for (int i = 0; i < n; i++) {
            V noise[4], scale = *thermal * (fresh / sqrtf(m->mass[i]));  /* thermal is sqrt(k T) */
            normals(state, noise, noise + 1);
            normals(state, noise + 2, noise + 3);
            before[i] = x[i];
            add(x + i, v[i], splat(0.5f * dt));
            v[i] = times(v[i], splat(keep));
            add(v + i, (P){noise[0], noise[1], noise[2]}, scale);
            add(x + i, v[i], splat(0.5f * dt));
            free[i] = x[i];
        }
        fix_positions(m, before, x);
        for (int i = 0; i < n; i++) add(v + i, minus(x[i], free[i]), splat(1 / dt));
    }
    *energy = force(m, x, f);
}

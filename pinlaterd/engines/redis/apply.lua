-- One batch: acks, checkpoints, releases, enqueues, claims, in this order, each in its turn, by the
-- files apply_*.lua that follow this one (scripts.py).
--
-- The batch is atomic. Redis runs a script alone, with nothing in between, and writes what it
-- changed to the append-only file as one transaction, of which a restart takes all or nothing. What
-- may be refused is refused by the script's first write (begin_write), before anything has changed;
-- the commands after it are such as cannot fail, unless a foreign writer put something else under
-- our keys.
--
-- Arguments: the shard, token, lease in ms, '1' if there are enqueues, now_ms, the latest run-after
-- in ms, most characters of a status; then of each kind how many ops, and of each op its queue and
-- what batch.py writes there. In front of the time: how many queues and priorities the batch has to
-- do with, and these, and how many queues it enqueues to, and these. Returns OK and, of each kind,
-- the ops' results; or DAMAGED, and then it has written nothing.

local problem = begin_write(ARGV[4] == '1')
if problem then
  return problem
end
take()
for _ = 1, take_number() do
  problem = damaged_set(take(), take())
  if problem then
    return problem
  end
end
for _ = 1, take_number() do
  local counter = counter_key(take())
  local last = redis.pcall('GET', counter)
  if type(last) == 'table' then
    return damage(counter, 'string')
  end
  if last and not (string.find(last, '^[0-9]+$') and number_in(last, 0, MOST_EXACT / 2)) then
    return { 'DAMAGED', counter, 'what is no id', 'the last id given' }
  end
end
local now, latest_ms, status_chars = take_number(), take_number(), take_number()
local now_seconds = seconds(now)
local score_now = scorer(now)

-- The next `count` arguments.
local function take_all(count)
  local values = {}
  for at = 1, count do
    values[at] = ARGV[taken + at]
  end
  taken = taken + count
  return values
end

local function each_op(apply_one)
  local results = {}
  for at = 1, take_number() do
    results[at] = apply_one(take())
  end
  return results
end

local function requeue(results, priority, id, run_after)
  results[#results + 1] = priority
  results[#results + 1] = id
  results[#results + 1] = run_after
end

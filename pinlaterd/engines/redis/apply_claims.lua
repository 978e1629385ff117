-- Claims. In front of the ops: most bytes of the batch, bytes of a job beside its body. Of each op:
-- most bytes, '1' if its first job counts as within them, how many runs. A run: how many, priority,
-- what its jobs take if their payloads are known, or ''; then ids, then claims, in a lean queue
-- what plc_ holds. The result of an op is that of its runs: how many jobs, if all were claimed and
-- their payloads are known; else a table of three for each: body, attempts allowed and remaining,
-- or nothing if it is not PENDING; in a lean queue what plb_ and plu_ hold, and nothing. That ends
-- before the first job that does not fit: it and those behind it in the op are left alone.

local room, job_bytes = take_number(), take_number()
local claimed_any = false
local NOTHING = { false, false, false }

-- Whether so many bytes more have room in the answer, and in the batch; then they are taken.
local function fits(answer, bytes)
  if bytes > answer.left and not answer.at_least_one then
    return false
  end
  if bytes > room and claimed_any then
    return false
  end
  answer.left, answer.at_least_one = answer.left - bytes, false
  room, claimed_any = room - bytes, true
  return true
end

-- Whether these ids are the first of a set, in its order. They mostly are: the ready index has the
-- same order.
local function are_first(set, ids)
  local first = redis.call('ZRANGE', set, 0, #ids - 1)
  for at = 1, #ids do
    if first[at] ~= ids[at] then
      return false
    end
  end
  return true
end

-- Note the claims of jobs of which nothing has to be read; false if one of them is not there.
local function note_claims(run)
  local keys = {}
  for at, id in ipairs(run.ids) do
    keys[at] = run.prefix .. id
  end
  if call_with_all('EXISTS', nil, keys) < #keys then
    return false
  end
  for at, key in ipairs(keys) do
    local added = redis.pcall('HSET', key, 'cd', run.claims[at])
    if type(added) == 'table' then -- no job, but a hand's doing: see below
      return false
    end
  end
  return true
end

-- Claim jobs that all are PENDING, the first of their set, and of which nothing has to be read;
-- false if one of them is not there.
local function claim_known(run)
  if run.lean then
    if redis.call('EXISTS', jobs_key(run.queue)) == 0 then
      return false
    end
    local records = {}
    for at, id in ipairs(run.ids) do
      records[2 * at - 1], records[2 * at] = id, run.claims[at]
    end
    call_with_all('HSET', claims_key(run.queue), records)
  elseif not note_claims(run) then
    return false
  end
  local scores = {}
  for at, id in ipairs(run.ids) do
    scores[2 * at - 1], scores[2 * at] = score_now[#id], id
  end
  redis.call('ZREMRANGEBYRANK', run.pending, 0, #run.ids - 1)
  add_all(run.running, scores)
  return true
end

-- What plb_ holds of a job of a lean queue. Some jobs are read at a time: so what is in memory are
-- a few bodies more than fit, or one more if they are large.
local READ_AT_ONCE, LARGE_BYTES = 16, 65536

local function lean_record(run, at)
  if at > run.read then
    local last = math.min(at + run.read_at_once - 1, #run.ids)
    run.records = redis.call('HMGET', run.jobs, unpack(run.ids, at, last))
    run.before, run.read = at - 1, last
  end
  local record = run.records[at - run.before]
  run.read_at_once = record and #record > LARGE_BYTES and 1 or READ_AT_ONCE
  return record
end

-- What a claim of a job hands out, and the bytes of its body; nil if it was evicted.
local function read_job(run, at)
  local id = run.ids[at]
  if run.lean then
    local record = lean_record(run, at)
    if not record then
      return nil
    end
    local status_bytes, begin = string.match(record, '^%d+ %-?%d+ (%d+);()')
    local update = run.updates and text_in(run.updates, id)
    local bytes = #record - (begin or 1) + 1 - (status_bytes or 0)
    return { record, update or false, false }, math.max(0, bytes)
  end
  local job = fields_of(run.prefix .. id, 'bd', 'al', 'ar', 'ra')
  if job then
    job[1] = job[1] or ''
  end
  return job, job and #job[1]
end

-- In PinLater's layout; in a lean queue those of a run are noted at once.
local function note_claim(run, id, claim, job)
  local key = run.prefix .. id
  if job[4] then
    redis.call('HSET', key, 'cd', claim)
  else -- PinLater's
    redis.call('HSET', key, 'cd', claim, 'ra', ms_of(redis.call('ZSCORE', run.pending, id)))
  end
end

-- Adds to `results`, up to the first job that does not fit; returns whether all did.
local function claim_and_read(run, answer, in_order, results)
  local ready = not in_order and scores_of(run.pending, run.ids)
  local met, scores, records, seen, all_fit = {}, {}, {}, {}, true
  for at, id in ipairs(run.ids) do
    local found = NOTHING
    if in_order or (ready[at] and not seen[id]) then
      local job, bytes = read_job(run, at)
      if job and not fits(answer, bytes + job_bytes) then
        all_fit = false
        break
      end
      met[#met + 1], seen[id] = id, true -- an evicted one goes, too
      if job then
        found = job
        local last = #scores + 2
        scores[last - 1], scores[last] = score_now[#id], id
        if run.lean then
          records[last - 1], records[last] = id, run.claims[at]
        else
          note_claim(run, id, run.claims[at], job)
        end
      end
    end
    results[3 * at - 2], results[3 * at - 1], results[3 * at] = found[1], found[2], found[3]
  end
  call_with_all('HSET', claims_key(run.queue), records)
  if in_order and #met > 0 then
    redis.call('ZREMRANGEBYRANK', run.pending, 0, #met - 1)
  else
    remove_all(run.pending, met)
  end
  add_all(run.running, scores)
  return all_fit
end

local function take_run(queue)
  local count, priority, bytes = take_number(), take(), take_number()
  local lean = is_lean(queue)
  local updates = lean and updates_key(queue)
  return {
    queue = queue,
    lean = lean,
    jobs = lean and jobs_key(queue),
    read = 0,
    read_at_once = 1,
    updates = updates and redis.call('EXISTS', updates) == 1 and updates,
    pending = set_key(queue, priority, PENDING),
    running = set_key(queue, priority, IN_PROGRESS),
    prefix = job_key(queue, ''),
    bytes = bytes,
    ids = take_all(count),
    claims = take_all(count),
  }
end

-- Returns its result, and whether all of it fitted.
local function claim_run(run, answer)
  local in_order, bytes = are_first(run.pending, run.ids), run.bytes
  if bytes and in_order and bytes <= answer.left and bytes <= room and claim_known(run) then
    fits(answer, bytes)
    return #run.ids, true
  end
  local results = {}
  return results, claim_and_read(run, answer, in_order, results)
end

local claims = each_op(function(queue)
  local answer = { left = take_number(), at_least_one = take() == '1' }
  local results, all_fit = {}, room > 0 or not claimed_any
  for at = 1, take_number() do
    local run = take_run(queue)
    results[at] = 0
    if all_fit then
      results[at], all_fit = claim_run(run, answer)
    end
  end
  return results
end)

return { 'OK', acks, checkpoints, releases, enqueues, claims }

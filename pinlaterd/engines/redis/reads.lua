-- Scripts that read jobs. Follows jobs.lua; each by its name. Arguments begin with the queue, if
-- nothing else is said, and results with OK.

local jobs = open_jobs()
local scripts = {}

-- The rank of the first member behind (score, id). Within one score, members of one length are in
-- the order of their numbers.
local function rank_behind(set, score, id)
  local low = redis.call('ZCOUNT', set, '-inf', '(' .. bound(score))
  local high = low + redis.call('ZCOUNT', set, bound(score), bound(score))
  while low < high do
    local middle = math.floor((low + high) / 2)
    if redis.call('ZRANGE', set, middle, middle)[1] > id then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- PENDING jobs in the order of (run-after, id). Arguments: queue, priority, run-after in ms and id
-- to begin behind (or '' and ''), the latest run-after in ms, limit. Returns OK and a table of id
-- and ms of each; or OK and two bounds: between them lie scores of PinLater's, by which jobs of one
-- millisecond are not in the order of their ids (rescore); or DAMAGED.
function scripts.pending()
  local queue, priority = take(), take()
  local after_ms, after_id, until_ms, limit = take_number(), take(), take_number(), take_number()
  local set = set_key(queue, priority, PENDING)
  local problem = damage(set, 'zset')
  if problem then
    return problem
  end

  -- Whether all scores that stand for a millisecond are of our making.
  local function in_order(ms)
    if ms > LATEST_ORDERED_MS then
      return true -- a PinLater's job that is not to be run; any order will do
    end
    local low, high = bound(first_score(queue, ms)), '(' .. bound(first_score(queue, ms + 1))
    local others = redis.call('ZCOUNT', set, low, high)
    for digits = 19, 1, -1 do
      if others == 0 then
        break
      end
      local score = bound(score_of(queue, ms, digits))
      others = others - redis.call('ZCOUNT', set, score, score)
    end
    return others == 0
  end

  -- All milliseconds from one score's to another's. Far in the future they have no width.
  local function out_of_order(from_score, to_score)
    local low = first_score(queue, ms_of(queue, from_score))
    local high = first_score(queue, ms_of(queue, to_score) + 1)
    return { 'OK', bound(math.min(low, from_score)), bound(math.max(high, to_score)) }
  end

  local first = 0
  if after_ms then
    local score = score_of(queue, after_ms, #after_id)
    if not in_order(after_ms) then
      return out_of_order(score, score)
    end
    first = rank_behind(set, score, after_id)
  end
  local rows = redis.call('ZRANGE', set, first, first + limit - 1, 'WITHSCORES')
  local found = {}
  local last_score
  for at = 1, #rows, 2 do
    local id, score = rows[at], tonumber(rows[at + 1])
    local ms = ms_of(queue, score)
    if ms > until_ms then
      last_score = nil
      break
    end
    if not jobs.is_id(id) or (score ~= score_of(queue, ms, #id) and ms <= LATEST_ORDERED_MS) then
      return out_of_order(score, tonumber(rows[#rows]))
    end
    last_score = score
    found[#found + 1] = id
    found[#found + 1] = ms
  end
  -- The last millisecond may go on behind the page.
  if last_score and #rows == 2 * limit and not in_order(ms_of(queue, last_score)) then
    return out_of_order(last_score, last_score)
  end
  return { 'OK', found }
end

-- A page of the jobs of one state. Arguments: queue, priority, state, score and id to begin behind
-- (or '' and ''), limit. Returns OK and a table of id, score and the ms that it stands for: fewer
-- than `limit` at the end only, and more where they are in runs, of which the last one is whole.
function scripts.page()
  local queue, priority, state = take(), take(), take()
  local score, id, limit = take_number(), take(), take_number()
  local set, found = set_key(queue, priority, state), {}
  if not damage(set, 'zset') then
    local first = score and rank_behind(set, score, id) or 0
    local rows = redis.call('ZRANGE', set, first, first + limit - 1, 'WITHSCORES')
    local runs = has_runs(queue, state) and runs_of(queue, priority)

    local function add(job, at)
      found[#found + 1] = job
      found[#found + 1] = rows[at]
      found[#found + 1] = ms_of(queue, rows[at])
    end

    for at = 1, #rows, 2 do
      if #found < 3 * limit then
        local run = runs and runs.holding(tonumber(rows[at]) or 0)
        for other = run and run.first or 1, run and run.last - 1 or 0 do
          add(string.format('%d', other), at + 1)
        end
        add(rows[at], at + 1)
      end
    end
  end
  return { 'OK', found }
end

-- The first jobs of runs. Arguments: queue, priority, the last job of each run. Returns OK, then of
-- each the first one's id; false if there is no such run.
function scripts.run_starts()
  local queue, priority = take(), take()
  local runs, found = runs_of(queue, priority), { 'OK' }
  for at, id in ipairs(take_all(#ARGV - taken)) do
    local run = runs.holding(tonumber(id))
    found[at + 1] = run and run.last == tonumber(id) and string.format('%d', run.first) or false
  end
  return found
end

-- Some jobs are read at a time: so what is in memory are a few bodies more than fit, or one more
-- if they are large.
local READ_AT_ONCE, LARGE_BYTES = 16, 65536

-- The bytes of the body in what plb_ holds.
local function body_bytes(record)
  local status_bytes, begin = string.match(record, '^%d+ %-?%d+ %-?%d+ (%d+);()')
  return math.max(0, #record - (begin or 1) + 1 - (status_bytes or 0))
end

-- Of jobs of a lean queue: tables of what plb_ and what plu_ holds.
local function lean_payloads(queue, ids, most_bytes)
  local key, updates_at = jobs_key(queue), updates_key(queue)
  local is_changed = redis.pcall('HLEN', updates_at) ~= 0
  local records, updates = {}, {}
  local left, exact, any, count, at = most_bytes, false, false, 1, 1
  while at <= #ids do
    local last = math.min(at + count - 1, #ids)
    local found = redis.pcall('HMGET', key, unpack(ids, at, last))
    local changes = is_changed and redis.pcall('HMGET', updates_at, unpack(ids, at, last)) or {}
    count = READ_AT_ONCE
    for offset = 1, last - at + 1 do
      local record = found[offset] or false
      if record then
        left = left - (exact and body_bytes(record) or #record)
        if left < 0 and not exact then -- the heads have been counted, too
          exact, left = true, most_bytes - body_bytes(record)
          for _, earlier in ipairs(records) do
            left = left - (earlier and body_bytes(earlier) or 0)
          end
        end
        if left < 0 and any then
          return { 'OK', records, updates }
        end
        any, count = true, #record > LARGE_BYTES and 1 or count
      end
      records[#records + 1] = record
      updates[#updates + 1] = changes[offset] or false
    end
    at = last + 1
  end
  return { 'OK', records, updates }
end

-- Tables of body, attempts allowed and remaining.
local function plain_payloads(queue, ids, most_bytes)
  local bodies, allowed, remaining, any = {}, {}, {}, false
  local prefix = job_key(queue, '')
  for at, id in ipairs(ids) do
    local f = redis.pcall('HMGET', prefix .. id, 'bd', 'al', 'ar')
    local is_there = not f.err and (f[1] or redis.call('EXISTS', prefix .. id) == 1)
    local body = is_there and (f[1] or '')
    if body then
      most_bytes = most_bytes - #body
      if most_bytes < 0 and any then
        break
      end
      any = true
    end
    bodies[at] = body
    allowed[at] = body and number_in(f[2], 0, 2 ^ 31 - 1) or 1
    remaining[at] = body and number_in(f[3], 0, 2 ^ 31 - 1) or 1
  end
  return { 'OK', bodies, allowed, remaining }
end

-- What claims would hand out. Arguments: queue, most bytes, ids. Returns OK, and columns as
-- `lean_payloads` or `plain_payloads` say, with nothing in the first one where there is no such job.
-- They end before the body with which all would have more than those bytes. Or DAMAGED.
function scripts.payloads()
  local queue, most_bytes = take(), take_number()
  local ids = take_all(#ARGV - taken)
  local read = is_lean(queue) and lean_payloads or plain_payloads
  return jobs.damage(queue) or read(queue, ids, most_bytes)
end

-- Whole jobs. Arguments: queue, the state they have to be in (or ''), whether with body ('1'), then
-- of each job priority and id. Returns OK, then for each a table of state, the ms of its score,
-- attempts allowed and remaining, status, created, run-after and updated in ms, claim, body, key,
-- what ply_ holds, what plz_ holds; or 0 if there is no such job; or -1 if it was evicted.
function scripts.lookup()
  local queue, wanted_state, with_body = take(), take(), take() == '1'
  local states = { PENDING, IN_PROGRESS, SUCCEEDED, FAILED }
  if wanted_state ~= '' then
    states = { wanted_state }
  end
  local found = { 'OK' }
  while taken < #ARGV do
    local priority, id = take(), take()
    local row = 0
    for _, state in ipairs(states) do
      local since, claim = jobs.since(queue, priority, id, state)
      if since then
        local job = jobs.read(queue, id, with_body)
        row = job and {
          tonumber(state), since, job.al or 1, job.ar or 0, job.cs, job.ca or since,
          job.ra or since, job.ua or since, claim or job.cd or false, job.bd or false,
          jobs.key_of(queue, id) or false, jobs.expiry_of(queue, id) or false,
          jobs.exact_of(queue, id) or false,
        } or -1
        break
      elseif redis.pcall('ZSCORE', set_key(queue, priority, state), id) and has_runs(queue, state) then
        row = -1 -- the end of a run that is gone
      end
    end
    found[#found + 1] = row
  end
  return found
end

-- The jobs that hold keys. Arguments: queue, or '' for keys of all queues; keys. Returns OK, then of
-- each key 'PRIORITY ID', 'PRIORITY ID QUEUE' if of all queues, or false if it is free.
function scripts.find_keys()
  local queue = take()
  local pattern = queue == '' and '^%d+ (%d+) (.+)$' or '^%d+ (%d+)$'
  local holders = holders_key(queue)
  local problem = damage(holders, 'hash')
  if problem then
    return problem
  end
  local wanted = take_all(#ARGV - taken)
  local found = redis.call('HMGET', holders, unpack(wanted))
  local result = { 'OK' }
  for at, holder in ipairs(found) do
    local id, other
    if holder then
      id, other = string.match(holder, pattern)
    end
    -- A queue that was deleted leaves its jobs' keys of all queues behind.
    local held = id and (not other or jobs.key_of(other, id) == '*' .. wanted[at])
    result[at + 1] = held and jobs.exists(other or queue, id) and holder or false
  end
  return result
end

-- How many jobs there are. Arguments: levels of priority, queues. Returns OK, then of each queue a
-- table of how many, by priority, then state.
function scripts.depths()
  local levels = take_number()
  local found = { 'OK' }
  while taken < #ARGV do
    local queue = take()
    local depths = {}
    for priority = 1, levels do
      for _, state in ipairs({ PENDING, IN_PROGRESS, SUCCEEDED, FAILED }) do
        local held = redis.pcall('ZCARD', set_key(queue, priority, state))
        held = type(held) == 'number' and held or 0
        if held > 0 and has_runs(queue, state) then
          local others = redis.pcall('ZSCORE', runs_key(queue, priority), state)
          held = held - (type(others) == 'string' and tonumber(others) or 0)
        end
        depths[#depths + 1] = held
      end
    end
    found[#found + 1] = depths
  end
  return found
end

return scripts[ARGV[1]]()
